// SPDX-License-Identifier: Apache-2.0
// Runs a saved model without Python: reads a matrix of floats from a file, writes the result to another.
//
//   main model.so x.bin ROWS COLUMNS y.bin
//
// Only headers of TVM's FFI are needed; libtvm_runtime must be linked, which knows the kinds of modules in the file.

#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/extra/module.h>
#include <tvm/ffi/function.h>

#include <cstdlib>
#include <fstream>
#include <iostream>
#include <stdexcept>
#include <string>

namespace ffi = tvm::ffi;

// Kernels may ask for memory that is aligned to 64 bytes.
struct AlignedAlloc {
  void AllocData(DLTensor* tensor) {
    size_t bytes = ffi::GetDataSize(*tensor);
    tensor->data = std::aligned_alloc(64, (bytes + 63) / 64 * 64 + 64);
    if (tensor->data == nullptr) throw std::bad_alloc();
  }
  void FreeData(DLTensor* tensor) { std::free(tensor->data); }
};

ffi::Tensor ReadMatrix(const std::string& path, int64_t rows, int64_t columns) {
  auto x = ffi::Tensor::FromNDAlloc(AlignedAlloc(), ffi::Shape({rows, columns}), DLDataType{kDLFloat, 32, 1},
                                    DLDevice{kDLCPU, 0});
  std::ifstream file(path, std::ios::binary);
  if (!file.read(static_cast<char*>(x.data_ptr()), rows * columns * sizeof(float))) {
    throw std::runtime_error("too few numbers in " + path);
  }
  return x;
}

// The virtual machine that runs the functions of a model.
ffi::Module LoadModel(const std::string& path) {
  ffi::Module library = ffi::Module::LoadFromFile(path);
  auto machine = library->GetFunction("vm_load_executable").value()().cast<ffi::Module>();
  const int pooled = 2;  // how memory between the kernels is allocated
  machine->GetFunction("vm_initialization").value()(static_cast<int>(kDLCPU), 0, pooled);
  return machine;
}

int main(int argc, char** argv) {
  if (argc != 6) {
    std::cerr << "usage: main model.so x.bin ROWS COLUMNS y.bin\n";
    return 2;
  }
  try {
    ffi::Module model = LoadModel(argv[1]);
    std::cout << model->GetFunction("sparsetir_signature").value()().cast<std::string>() << "\n";
    ffi::Function forward = model->GetFunction("forward").value();
    ffi::Tensor y = forward(ReadMatrix(argv[2], std::atoll(argv[3]), std::atoll(argv[4]))).cast<ffi::Tensor>();
    std::ofstream file(argv[5], std::ios::binary);
    file.write(static_cast<const char*>(y.data_ptr()), y.numel() * sizeof(float));
  } catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
    return 1;
  }
}
