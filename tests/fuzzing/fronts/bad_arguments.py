# SPDX-License-Identifier: Apache-2.0
"""Bad arguments of public functions: whatever is raised is a class of the package's errors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from fuzzing.case import Case, Finding, Front, unclear
from fuzzing.values import PRELUDE
from sparsetir.errors import ArgumentError, ArgumentTypeError, SparseTIRError

#: what stands for sound arguments, by name
SETTING = f'''{PRELUDE}
import torch
import sparsetir.torch
from sparsetir import formats

def csr_of(data, indices, indptr, shape):
    """A matrix whose arrays need not fit each other."""
    made = sp.csr_array(shape, dtype=np.asarray(data).dtype if np.asarray(data).dtype.kind in "iufcb" else "float32")
    made.data, made.indices, made.indptr = np.asarray(data), np.asarray(indices), np.asarray(indptr)
    return made

S = csr_of(np.array([1, 2, 3], "float32"), np.array([0, 2, 1], "int32"), np.array([0, 2, 2, 3], "int32"), (3, 3))
D, V = np.arange(9, dtype="float32").reshape(3, 3), np.arange(3, dtype="float32")
T = sparsetir.SparseTensor.from_any(S)
G = sparsetir.torch.Graph(S)
X, E = torch.ones(3, 2), torch.ones(3)
SPMM = sparsetir.build(sparsetir.ops.spmm())
BOUND = SPMM.bind(A=S)
SDDMM = sparsetir.build(sparsetir.ops.sddmm())
PLAN = sparsetir.matmul_plan(S, S)
STEP = sparsetir.einsum_expression("ij,jk->ik", S, D)
L = sparsetir.lazy(S)
OPERATOR = sparsetir.linear_operator(S)
LAYER = sparsetir.torch.SparseLinear(3, 3, density=0.5)
'''
#: calls with sound arguments; each argument is replaced in turn
CALLS = (
    ("sparsetir.matmul({}, {})", "S", "S"),
    ("sparsetir.matmul({}, {})", "S", "D"),
    ("sparsetir.matmul(S, S, mask={}, complement={})", "S", "True"),
    ("sparsetir.matmul(S, S, top={})", "2"),
    ("sparsetir.matmul(S, S, threshold={})", "0.5"),
    ("sparsetir.matmul_plan({}, {})", "S", "S"),
    ("PLAN({}, {})", "S", "S"),
    ("sparsetir.add({}, {}, {}, {})", "S", "S", "1", "2.0"),
    ("sparsetir.subtract({}, {})", "S", "S"),
    ("sparsetir.multiply({}, {})", "S", "S"),
    ("sparsetir.multiply({}, {})", "S", "D"),
    ("sparsetir.maximum({}, {})", "S", "S"),
    ("sparsetir.rap({}, {}, {})", "S", "S", "S"),
    ("sparsetir.triangles({})", "S"),
    ("sparsetir.einsum({}, {}, {})", "'ij,jk->ik'", "S", "D"),
    ("sparsetir.einsum('ij,j->i', S, V, reduce={}, combine={}, fill={})", "'max'", "'add'", "-inf"),
    ("sparsetir.einsum('ij,ij->ij', S, S, result={})", "'dense'"),
    ("sparsetir.einsum_expression({}, {}, {})", "'ij,jk->ik'", "S", "D"),
    ("STEP({}, {})", "S", "D"),
    ("STEP.bind({})(D)", "S"),
    ("SPMM(A={}, B={})", "S", "D"),
    ("SPMM(a={}, indptr={}, indices={}, B={})", "S.data", "S.indptr", "S.indices", "D"),
    ("SPMM(A=S, B=D, C={})", "np.zeros((3, 3), 'float32')"),
    ("SPMM(A=S, B=D, m={}, n={})", "3", "3"),
    ("SPMM.bind(A={})", "S"),
    ("BOUND(B={})", "D"),
    ("SDDMM(S={}, X={}, Y={})", "S", "D", "D"),
    ("sparsetir.linear_operator({})", "S"),
    ("sparsetir.lazy({})", "S"),
    ("sparsetir.compute({})", "L @ D"),
    ("sparsetir.compute(L @ {})", "D"),
    ("sparsetir.compute(L * {})", "2.0"),
    ("sparsetir.relu({})", "L"),
    ("sparsetir.softmax({})", "L"),
    ("sparsetir.SparseTensor.from_any({}, {}, idtype={})", "S", "'csr'", "'int32'"),
    ("sparsetir.SparseTensor.from_dense({}, {})", "D", "'csr'"),
    ("sparsetir.SparseTensor.from_coo({}, {}, {})", "np.array([[0, 1], [2, 0]])", "np.ones(2)", "(3, 3)"),
    ("sparsetir.SparseTensor.from_scipy({})", "S"),
    ("sparsetir.SparseTensor.from_torch({})", "torch.eye(3).to_sparse_csr()"),
    ("sparsetir.SparseTensor.from_file({})", "'none.mtx'"),
    ("sparsetir.CooTensor({}, {}, {})", "np.array([[0, 1], [2, 0]])", "np.ones(2)", "(3, 3)"),
    ("sparsetir.matmul(sparsetir.CooTensor({}, {}, {}), S)", "np.array([[0, 1], [2, 0]])", "np.ones(2)", "(3, 3)"),
    ("T.convert({})", "'csc'"),
    ("T.with_values({})", "np.ones(3)"),
    ("T.to_scipy({})", "'csr'"),
    ("T @ {}", "D"),
    ("T + {}", "T"),
    ("T * {}", "2.0"),
    ("T / {}", "2.0"),
    ("T ** {}", "2"),
    ("T > {}", "0.5"),
    ("T[{}]", "1"),
    ("T[{}, {}]", "0", "slice(0, 2)"),
    ("T.sum(axis={})", "0"),
    ("T.mean(axis={})", "0"),
    ("T.max(axis={})", "0"),
    ("T.astype({})", "'float64'"),
    ("sparsetir.format({})", "'bsr(r=2, c=2)'"),
    ("formats.bsr({}, {})", "2", "2"),
    ("formats.ell({})", "2"),
    ("formats.hyb({}, {})", "1", "(1, 2)"),
    ("sparsetir.decompose_format({}, {})", "sparsetir.ops.spmm()", "{'A': formats.ell()}"),
    ("sparsetir.build({}, {}, schedule={})", "sparsetir.ops.spmm()", "None", "None"),
    ("sparsetir.Choices(tile={}, chunks={}, unroll={})", "8", "1", "2"),
    ("sparsetir.Accumulators(insertion={}, kind={}, counted={}, order={})", "2", "'bits'", "True", "'stored'"),
    ("sparsetir.ops.spmm({}, {}, idtype={})", "'float32'", "'csr'", "'int32'"),
    ("sparsetir.ops.sddmm({})", "'float32'"),
    ("sparsetir.parse({})", "sparsetir.script(sparsetir.ops.spmm())"),
    ("sparsetir.script({})", "sparsetir.ops.spmm()"),
    ("sparsetir.verify({})", "sparsetir.ops.spmm()"),
    ("sparsetir.lower({}, stage={})", "sparsetir.ops.spmm()", "2"),
    (
        "sparsetir.interpret({}, {})",
        "sparsetir.ops.spmm()",
        "dict(indptr=[0, 1], indices=[2], a=[3], b=[[1], [2], [4]])",
    ),
    ("sparsetir.Schedule({})", "sparsetir.ops.spmm()"),
    ("sparsetir.read({})", "'none.mtx'"),
    ("sparsetir.load({})", "'none.so'"),
    ("sparsetir.set_num_threads({})", "2"),
    ("sparsetir.aligned({})", "D"),
    ("sparsetir.pattern({})", "S"),
    ("sparsetir.torch.Graph({})", "S"),
    ("sparsetir.torch.Graph({}, {})", "torch.tensor([[0, 1], [1, 2]])", "3"),
    ("G.spmm({}, {}, {})", "X", "E", "'sum'"),
    ("G.spmm(X, bias={}, activation={})", "torch.ones(2)", "'relu'"),
    ("G.sddmm({}, {})", "X", "X"),
    ("G.softmax({})", "E"),
    ("G.attention({}, {}, {}, {})", "X", "X", "X", "0.5"),
    ("G.attention(X, X, X, edges={}, dropout={})", "None", "0.0"),
    ("G.additive_attention({}, {}, {}, {})", "E", "E", "X", "0.2"),
    ("G.conv({}, {}, {}, {}, {})", "X", "torch.ones(4, 2)", "torch.ones(4)", "'sum'", "'relu'"),
    ("G.edge_sum({}, {})", "E", "E"),
    ("G.dropout({}, {})", "E", "0.5"),
    ("G.weighted({})", "E"),
    ("LAYER({})", "torch.ones(2, 3)"),
    ("sparsetir.torch.SparseLinear({}, {}, density={})", "3", "3", "0.5"),
    ("sparsetir.torch.sparsify_(torch.nn.Linear(3, 3), {})", "0.5"),
    ("LAYER.regrow({})", "torch.ones(3, 3, dtype=torch.bool)"),
    ("sparsetir.relax.SparsifyWeights(decide={}, rows={}, most_dense={})", "'predict'", "4", "0.5"),
)
BAD = r"""
None
True
-1
0
1
7
2**40
2**70
1.5
nan
inf
1j
''
'ij'
'csr'
'ü\0'
b'x'
()
[]
{}
(3,)
(3, 3)
(-1, 3)
(2**40, 2**40)
[1, [2]]
object()
int
len
...
slice(None)
slice(2, 0, -1)
range(3)
np.zeros(0)
np.zeros((0, 3), 'float32')
np.zeros((3, 0))
np.array(1.0)
np.float32(2)
np.ones((3, 3), 'complex64')
np.ones((3, 3), bool)
np.ones((3, 3), object)
np.ones((3, 3), 'U1')
np.ones((3, 3), 'M8[s]')
np.ones((3, 3), 'int8')
np.ones((3, 3), 'float16')
np.ones((3, 3), ml_dtypes.bfloat16)
np.ones((3, 3), 'longdouble')
np.ones((3, 3), '>f4')
np.ones((2, 3, 3), 'float32')
np.ones(3, 'uint64')
np.full((3, 3), nan, 'float32')
np.ma.masked_array(np.ones((3, 3)), np.eye(3))
np.matrix(np.eye(3))
np.zeros((3, 3), [('a', 'f4')])
memoryview(b'abc')
D
S
T
V
X
E
L
G
SPMM
BOUND
STEP
LAYER
OPERATOR
sp.csr_array((0, 0))
sp.csr_array((3, 3), dtype='complex128')
sp.csc_matrix(np.eye(3))
sp.coo_array(np.ones(3))
sp.dok_array((3, 3))
sp.lil_array((3, 3))
sp.dia_array((3, 3))
sp.bsr_array((4, 4), blocksize=(2, 2))
sp.csr_array((3, 3), dtype=bool)
sp.csr_array((3, 3), dtype='longdouble')
sp.csr_array((3, 2**33))
csr_of([1.0, 2], [0, 9], [0, 1, 2, 2], (3, 3))
csr_of([1.0, 2], [0, -1], [0, 1, 2, 2], (3, 3))
csr_of([1.0, 2], [0, 1], [0, 2, 1, 2], (3, 3))
csr_of([1.0, 2], [0, 1], [0, 9, 9, 9], (3, 3))
csr_of([1.0], [0, 1], [0, 1, 2, 2], (3, 3))
csr_of([1.0, 2], [0, 1], [0, 2], (3, 3))
csr_of([], [], [], (3, 3))
csr_of([1.0, 2], [0.0, 1.0], [0, 1, 2, 2], (3, 3))
csr_of(['a', 'b'], [0, 1], [0, 1, 2, 2], (3, 3))
csr_of([[1.0, 2]], [0, 1], [0, 1, 2, 2], (3, 3))
csr_of([1.0, 2], [0, 1], [0, nan, 2, 2], (3, 3))
sparsetir.CooTensor(np.array([[0], [9]]), np.ones(1), (3, 3))
sparsetir.CooTensor(np.array([[0, 1]]), np.ones(2), (3,))
sparsetir.CooTensor(np.zeros((3, 0), int), np.ones(0), (2, 2, 2))
torch.ones(3, 3)
torch.ones(0)
torch.tensor(1.0)
torch.ones(3, 3, dtype=torch.bfloat16)
torch.ones(3, 3, dtype=torch.complex64)
torch.ones(3, 3).to_sparse_csr()
torch.ones(3, 3, device='meta')
torch.ones(3, 3, requires_grad=True)
torch.ones(3, 3).to_sparse_bsr((1, 1))
torch.zeros(2, 3, dtype=torch.int64)
torch.tensor([[0, 9], [1, 2]])
torch.tensor([[0, -1], [1, 2]])
torch._neg_view(torch.ones(3, 3))
torch.nn.Linear(3, 3)
torch.float32
np.float32
'float128'
'int4'
'ij,jk->ik'
'i,j'
'ij,jk->iz'
'ij,jj->i'
'->'
'...'
'ij,jk->ii'
'i j'
'\u00e9j,jk->ik'
'(i, j) -> (i : dense, j : compressed)'
'bsr(r=0, c=2)'
'bsr(r=2'
'hyb'
formats.bsr(2, 2)
formats.hyb(1, (1, 2))
'/'
'/dev/null'
'a.mtx'
'\0.mtx'
sparsetir.ops.spmm()
sparsetir.ops.sddmm()
sparsetir.ops.spgemm()
sparsetir.Choices()
sparsetir.Accumulators()
{'A': 3}
{'Q': formats.ell()}
{3: formats.ell()}
'@T.prim_func\ndef f(: pass'
'x' * 100
lambda x: x
type('Odd', (), {'shape': 3})()
type('Odd', (), {'shape': (3, 3), 'coords': 1, 'values': 2})()
type('Odd', (), {'__array__': lambda self, dtype=None, copy=None: np.eye(3)})()
""".strip().split("\n")
#: calls that have no sound answer of their own in time
UNSERVED = (("sparsetir.set_num_threads({})", "2**40"), ("sparsetir.set_num_threads({})", "2**70"))
PYTHON = ("unsupported operand type(s) for", "not supported between instances of", "can't multiply sequence by non-int")
_SETTING: dict[str, Any] = {}


def setting() -> dict[str, Any]:
    """The names of the setting, made once."""
    if not _SETTING:
        import warnings

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            exec(compile(SETTING, "<setting>", "exec"), _SETTING)
    return _SETTING


@dataclass(frozen=True)
class ArgumentCase(Case):
    """A call, and its arguments as text."""

    call: str
    arguments: tuple[str, ...]
    sound: tuple[str, ...]

    def run(self) -> Finding | None:
        names = dict(setting())
        try:
            code = [compile(text, "<argument>", "eval") for text in self.arguments]
            names.update({f"a{n}": eval(c, names) for n, c in enumerate(code)})
        except Exception:
            return None  # the argument itself cannot be made
        text = self.call.format(*(f"a{n}" for n in range(len(self.arguments))))
        try:
            eval(compile(text, "<call>", "eval"), names)
        except SparseTIRError as error:
            if self.arguments == self.sound and not any("'none." in text for text in self.sound):
                return Finding("wrong", f"{self.call.partition('(')[0]}: a sound call is refused", str(error))
            raise
        except Exception as error:
            if isinstance(error, TypeError) and any(words in str(error) for words in PYTHON):
                raise ArgumentTypeError("Python's answer where neither operand knows the other") from error
            if isinstance(error, MemoryError):
                raise ArgumentError("sizes beyond the memory") from error
            finding = unclear(error)
            bad = ", ".join(a for a, b in zip(self.arguments, self.sound, strict=True) if a != b)
            return replace(
                finding, label=f"{self.call.partition('(')[0]}: {finding.label}", detail=f"{bad}\n{finding.detail}"
            )
        finally:
            if "num_threads" in self.call:
                names["sparsetir"].set_num_threads(2)
        return None

    def smaller(self) -> Iterator[Case]:
        for n, (one, sound) in enumerate(zip(self.arguments, self.sound, strict=True)):
            if one != sound:
                yield replace(self, arguments=(*self.arguments[:n], sound, *self.arguments[n + 1 :]))

    def script(self) -> str:
        return (
            f"{SETTING}\nprint('expected a result or a SparseTIRError')\ntry:\n"
            f"    print('got     ', {self.call.format(*self.arguments)})\n"
            "except sparsetir.errors.SparseTIRError as error:\n    print('got     ', type(error).__name__, error)\n"
            "except Exception as error:\n    print('got     ', type(error).__name__, error)\n"
            "    raise SystemExit(1) from error\n"
        )


class BadArguments(Front):
    """Calls of the public functions with bad arguments."""

    name, groups, patience = "arguments", 1, 1 << 30

    def draw(self, rng: Random) -> Iterator[Case]:
        for _ in range(40):
            call, *sound = rng.choice(CALLS)
            bad = list(sound)
            # A sound call now and then: it must be answered.
            for _ in range(rng.choice([0, 1, 1, 1, 1, 1, 1, 2, 2])):
                bad[rng.randrange(len(bad))] = rng.choice(BAD)
            if not any(call == c and b in bad for c, b in UNSERVED):
                yield ArgumentCase(call, tuple(bad), tuple(sound))


__all__ = ["ArgumentCase", "BadArguments"]
