; Runs the parallel loops of TVM kernels on the threads of OpenMP. What begins with a dollar is put in by openmp.py.
;
; The launcher has the signature of TVMBackendParallelLaunch: a function of (task, environment, data), that data, and the
; number of tasks, 0 for as many as there are threads.

$head

%environment = type { ptr, i32 } ; a barrier's handle, the number of tasks
%work = type { ptr, ptr, i32, ptr } ; the function, its data, the number of tasks, the error of a task or null

@threads = internal global i32 0 ; of OpenMP; 0: those of TVM
@kind = internal constant [13 x i8] c"RuntimeError\00"
@message = internal constant [23 x i8] c"a parallel task failed\00"

define i32 @launch(ptr %function, ptr %data, i32 %asked) {
entry:
  %threads = load atomic i32, ptr @threads monotonic, align 4
  %is.off = icmp eq i32 %threads, 0
  br i1 %is.off, label %tvm, label %on

tvm:
  %passed.on = tail call i32 $TVMBackendParallelLaunch(ptr %function, ptr %data, i32 %asked)
  ret i32 %passed.on

on:
  %is.all = icmp eq i32 %asked, 0
  %tasks = select i1 %is.all, i32 %threads, i32 %asked
  %work = alloca %work
  %data.at = getelementptr %work, ptr %work, i32 0, i32 1
  %tasks.at = getelementptr %work, ptr %work, i32 0, i32 2
  %error.at = getelementptr %work, ptr %work, i32 0, i32 3
  store ptr %function, ptr %work
  store ptr %data, ptr %data.at
  store i32 %tasks, ptr %tasks.at
  store ptr null, ptr %error.at
  %is.one = icmp eq i32 %threads, 1
  br i1 %is.one, label %alone, label %team

alone:
  call void @run(ptr %work, i32 0, i32 1)
  br label %done

team:
  call void $GOMP_parallel(ptr @join, ptr %work, i32 %threads, i32 0)
  br label %done

done:
  %error = load ptr, ptr %error.at
  %is.good = icmp eq ptr %error, null
  br i1 %is.good, label %good, label %bad

good:
  ret i32 0

bad: ; an error belongs to the thread in which it was raised: it is moved to this one
  call void $TVMFFIErrorSetRaised(ptr %error)
  %dropped = call i32 $TVMFFIObjectDecRef(ptr %error)
  ret i32 -1
}

define internal void @join(ptr %work) {
  %first = call i32 $omp_get_thread_num()
  %step = call i32 $omp_get_num_threads()
  call void @run(ptr %work, i32 %first, i32 %step)
  ret void
}

; OpenMP may give fewer threads than it was asked for: each takes every so many tasks.
define internal void @run(ptr %work, i32 %first, i32 %step) {
entry:
  %environment = alloca %environment
  %raised.at = alloca ptr
  %data.at = getelementptr %work, ptr %work, i32 0, i32 1
  %tasks.at = getelementptr %work, ptr %work, i32 0, i32 2
  %error.at = getelementptr %work, ptr %work, i32 0, i32 3
  %count.at = getelementptr %environment, ptr %environment, i32 0, i32 1
  %function = load ptr, ptr %work
  %data = load ptr, ptr %data.at
  %tasks = load i32, ptr %tasks.at
  store ptr null, ptr %environment
  store i32 %tasks, ptr %count.at
  br label %head

head:
  %task = phi i32 [ %first, %entry ], [ %next, %latch ]
  %is.there = icmp slt i32 %task, %tasks
  br i1 %is.there, label %body, label %exit

body:
  %status = call i32 %function(i32 %task, ptr %environment, ptr %data)
  %is.good = icmp eq i32 %status, 0
  br i1 %is.good, label %latch, label %failed

failed:
  store ptr null, ptr %raised.at
  call void $TVMFFIErrorMoveFromRaised(ptr %raised.at)
  %moved = load ptr, ptr %raised.at
  %is.said = icmp ne ptr %moved, null
  br i1 %is.said, label %keep, label %say

say:
  call void $TVMFFIErrorSetRaisedFromCStr(ptr @kind, ptr @message)
  call void $TVMFFIErrorMoveFromRaised(ptr %raised.at)
  br label %keep

keep:
  %raised = load ptr, ptr %raised.at
  %before = atomicrmw xchg ptr %error.at, ptr %raised seq_cst
  %is.first = icmp eq ptr %before, null
  br i1 %is.first, label %latch, label %drop

drop:
  %dropped = call i32 $TVMFFIObjectDecRef(ptr %before)
  br label %latch

latch:
  %next = add i32 %task, %step
  br label %head

exit:
  ret void
}

; For Python: the launcher's address, and how many threads it uses.
define i32 @__tvm_ffi_address(ptr %self, ptr %arguments, i32 %count, ptr %result) {
  %value.at = getelementptr i8, ptr %result, i64 8
  store i32 1, ptr %result ; an integer
  store i64 ptrtoint (ptr @launch to i64), ptr %value.at
  ret i32 0
}

define i32 @__tvm_ffi_use(ptr %self, ptr %arguments, i32 %count, ptr %result) {
  %value.at = getelementptr i8, ptr %arguments, i64 8
  %value = load i64, ptr %value.at
  %threads = trunc i64 %value to i32
  store atomic i32 %threads, ptr @threads monotonic, align 4
  store i32 0, ptr %result ; nothing
  ret i32 0
}

!llvm.module.flags = !{!0}
!0 = $target
