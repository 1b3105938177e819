# SPDX-License-Identifier: Apache-2.0
"""Functions of the dialect inside `T.prim_func`: each emits standard TIR nodes."""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from tvm import ir, tirx
from tvm.ir import Call, Var
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T
from tvm.tirx.script import parser as _tirx

from sparsetir.errors import VerifyError
from sparsetir.ir import dialect
from sparsetir.ir.rules import INDEX_DTYPES, SEARCHES, chain_fault, fuse_fault, loads, merge_fault
from sparsetir.ir.views import SPARSE_ITER, Axis, cast, const, decode_axis, merge_domain
from sparsetir.utils.arguments import VALUE_DTYPES, as_index, dtype_name, itemsize, shown

# TVM's functions of expressions, such as ``T.exp``, with a check: many end the process where an argument is None.


MODULES = ("tvm.tirx.op", "tvm.ir.prim.op")


def _checked(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        values = [*args, *(value for key, value in kwargs.items() if key != "span")]
        if any(value is None for value in values):
            message = f"T.{name} takes numbers and expressions, got None"
            raise VerifyError(f"{message}; a function that is called here must return an expression")
        return function(*args, **kwargs)

    return checked


def _functions() -> dict[str, Callable[..., Any]]:
    by_name = {name: getattr(_tirx, name) for name in _tirx.__all__}
    of_values = [n for n, f in by_name.items() if getattr(f, "__module__", "") in MODULES]
    return {name: _checked(name, by_name[name]) for name in (*of_values, "cast", "min", "max")}


FUNCTIONS = _functions()


# What the names of the dialect do inside a ``T.prim_func``: each emits standard TIR nodes.
#
# The axis and buffer constructors check their arguments at once, so that an error carries the user's line.


# `arg` has no operand to take its type from, so its text must say it.
if dialect.OPS["arg"].get_attr("TScriptDtypePrintLocation") is None:
    ir.register_op_attr("sparsetir.arg", "TScriptDtypePrintLocation", 1)


@dataclass
class _Function:
    """What is known of the function being parsed."""

    axes: dict[Var, Axis] = field(default_factory=dict)
    views: dict[Var, tuple[Axis, ...]] = field(default_factory=dict)
    matched: dict[Var, Var] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)


class _Scopes(threading.local):
    """The functions that this thread is parsing, the innermost last, as TVM's builder of a thread is its own."""

    def __init__(self) -> None:
        self.functions = [_Function()]


_scopes = _Scopes()


@contextlib.contextmanager
def function_scope() -> Iterator[None]:
    """Set aside the axes of other functions while one is parsed."""
    _scopes.functions.append(_Function())
    try:
        yield
    finally:
        _scopes.functions.pop()


# ---------------------------------------------------------------------------------------------- checks


def _check_idtype(idtype: Any) -> str:
    name = dtype_name(idtype)
    if name not in INDEX_DTYPES:
        message = f"an axis counts in int32 or int64, got idtype={shown(idtype)}"
        raise VerifyError(message)
    return name


def _check_dtype(dtype: Any) -> str:
    name = dtype_name(dtype)
    if name not in VALUE_DTYPES:
        message = f"a sparse buffer holds one of {', '.join(VALUE_DTYPES)}, got dtype={shown(dtype)}"
        raise VerifyError(message)
    return name


def _size(value: Any, dtype: str) -> ir.Expr:
    value = as_index(value)
    if isinstance(value, bool) or not isinstance(value, (int, ir.Expr)):
        raise VerifyError(f"a size must be an integer or an integer expression, got {shown(value)}")
    if isinstance(value, int):
        if value < 0:
            raise VerifyError(f"a size must not be negative, got {value}")
        return const(value, dtype)
    if not str(value.ty.dtype).startswith(("int", "uint")):
        raise VerifyError(f"a size must be an integer, got {value} of {value.ty.dtype}")
    return value


def _pair(value: Any, meaning: str) -> tuple[Any, Any]:
    if not isinstance(value, (tuple, list)):
        return value, None
    if len(value) != 2:
        raise VerifyError(f"expected {meaning}, got a tuple of {len(value)}")
    return value[0], value[1]


def _axis_of(value: Any, role: str) -> Axis:
    axis = _scopes.functions[-1].axes.get(value) if isinstance(value, Var) else None
    if axis is None:
        shown = value.name if isinstance(value, Var) else value
        raise VerifyError(f"{role} must be an axis declared earlier in this function, got {shown!r}")
    return axis


def _parent_args(parent: Any) -> tuple[Axis | None, ir.Expr, ir.Expr]:
    """Return the decoded parent, its operand and its number of positions."""
    if parent is None:
        return None, dialect.call("root", []), const(1)
    axis = _axis_of(parent, "the parent")
    return axis, parent, axis.count


# ---------------------------------------------------------------------------------------------- axes


def _declare(name: str, args: list[Any], idtype: str) -> Var:
    value = dialect.call(name, args, idtype)
    var = T.Bind(value)
    _scopes.functions[-1].axes[var] = decode_axis(var, value, _scopes.functions[-1].axes)
    return var


def _auxiliary(array: Any, shape: list[ir.Expr], idtype: str, role: str) -> Var:
    """Return the buffer behind an auxiliary array given as a handle or as a buffer."""
    if tirx.is_buffer_var(array):
        description = str(array.ty.dtype)
        if description not in INDEX_DTYPES:
            raise VerifyError(f"{role} must be an int32 or int64 array, got {array.name} of {description}")
        if len(array.ty.shape) != 1:
            description = f"{array.name} with {len(array.ty.shape)} dimensions"
            message = f"{role} must be one-dimensional, got {description}; declare and pass it flat"
            raise VerifyError(message)
        return array
    if not _is_handle(array):
        raise VerifyError(f"{role} must be a T.handle or T.Buffer parameter, got {_shown(array)}")
    matched = _scopes.functions[-1].matched
    if array not in matched:
        buffer = T.match_buffer(array, shape, idtype, align=itemsize(idtype))
        IRBuilder.name(str(array.name), buffer)
        matched[array] = buffer
    return matched[array]


def _is_handle(value: Any) -> bool:
    return isinstance(value, Var) and isinstance(value.ty, ir.PointerType)


def _shown(value: Any) -> str:
    """Describe a user's value for a message."""
    if not isinstance(value, Var):
        return repr(value)
    return f"{value.name}, which is {'an axis' if value in _scopes.functions[-1].axes else f'of type {value.ty}'}"


def _known_size(array: Any) -> ir.Expr | None:
    """Return the number of elements of an array that is a buffer or has become one."""
    buffer = array if tirx.is_buffer_var(array) else _scopes.functions[-1].matched.get(array)
    return None if buffer is None else buffer.ty.shape[0]


def _implicit_count(idtype: str, hint: str) -> Var:
    """Return a size the caller's array decides."""
    var = Var(hint, ir.PrimType(idtype))
    return var


def _rule(function: Callable[..., Any], arity: int, idtype: str, role: str) -> ir.Expr:
    """Convert a callable to an expression with ``arg(k)`` for parameter k; of indices the last may be the position."""
    count = len(inspect.signature(function).parameters)
    if count not in (arity, arity + (role == "indices")):
        then = ", then the slot" if role == "indices" else ""
        message = f"{role} must take {arity} arguments (the ancestors' coordinates{then}), it takes {count}"
        more = f"; with the position at the end it would be {arity + 1}" if role == "indices" else ""
        raise VerifyError(message + more)
    value = function(*(dialect.call("arg", [k], idtype) for k in range(count)))
    return const(value, idtype) if isinstance(value, int) else cast(value, idtype)


def _is_formula(indices: Any) -> bool:
    """Return whether a callable stands for an index array."""
    return callable(indices) and not isinstance(indices, ir.Expr)


def _arity(axis: Axis | None) -> int:
    """Return the arity of a formula for indices below `axis`: the ancestors' coordinates and the slot."""
    return 1 if axis is None else len(axis.ancestors) + 2


def dense_fixed(length: Any, idtype: str = "int32") -> Var:
    """Return an axis of `length` consecutive coordinates."""
    idtype = _check_idtype(idtype)
    return _declare("dense_fixed", [cast(_size(length, idtype), idtype)], idtype)


def dense_variable(
    parent: Any,
    shape: Any,
    indptr: Any = None,
    idtype: str = "int32",
    *,
    extent: Callable[..., Any] | None = None,
    offset: Callable[..., Any] | None = None,
) -> Var:
    """Return a ragged axis: each parent position has its own number of consecutive coordinates.

    `shape` is ``length`` or ``(length, nnz)``. Instead of `indptr`, `extent` and `offset` may give the number
    of slots and the first position of a fiber as functions of the ancestors' coordinates.
    """
    idtype = _check_idtype(idtype)
    axis, operand, above = _parent_args(parent)
    length, nnz = _pair(shape, "length or (length, nnz)")
    if indptr is None:
        if extent is None or offset is None:
            raise VerifyError("a ragged axis needs indptr, or both extent= and offset=")
        arity = len(axis.ancestors) + 1 if axis is not None else 0
        rules = [_rule(f, arity, idtype, r) for f, r in ((extent, "extent"), (offset, "offset"))]
        if nnz is None and (tables := loads(rules[1])):  # what an array holds decides the count
            nnz = _implicit_count(idtype, f"{tables[0].buffer.name}_nnz")
        elif nnz is None:
            if arity != 1:
                raise VerifyError("give (length, nnz): the number of positions is only known below a root axis")
            nnz = _total(rules[1], cast(above, idtype))
        args = [operand, cast(_size(length, idtype), idtype), cast(_size(nnz, idtype), idtype), *rules]
        return _declare("dense_implicit", args, idtype)
    pointers = _auxiliary(indptr, [above + 1], idtype, "indptr")
    idtype = str(pointers.ty.dtype)
    nnz = _implicit_count(idtype, f"{pointers.name}_nnz") if nnz is None else nnz
    args = [operand, cast(_size(length, idtype), idtype), cast(_size(nnz, idtype), idtype), pointers]
    return _declare("dense_variable", args, idtype)


def _total(offset: ir.Expr, parent_count: ir.Expr) -> ir.Expr:
    from sparsetir.ir.views import substitute_args

    return substitute_args(offset, [parent_count])


def sparse_fixed(
    parent: Any,
    shape: Any,
    indices: Any,
    idtype: str = "int32",
    sorted: bool = True,
    *,
    unique: bool = True,
    full: bool = False,
) -> Var:
    """Return an axis with the same number of stored coordinates below every parent position (ELL).

    `shape` is ``length`` or ``(length, nnz_cols)``. `indices` is an array, or a callable of the ancestors' coordinates,
    the slot and, if it takes one more, the position; a coordinate outside ``[0, length)`` marks an absent slot. `full`
    promises that all are present.
    """
    idtype = _check_idtype(idtype)
    axis, operand, above = _parent_args(parent)
    length, width = _pair(shape, "length or (length, nnz_cols)")
    if _is_formula(indices):
        if width is None:
            raise VerifyError("give (length, nnz_cols): a callable does not tell the number of slots")
        where: Any = _rule(indices, _arity(axis), idtype, "indices")
    else:
        if width is None:
            width = _implicit_width(indices, above, idtype)
        width = cast(_size(width, idtype), idtype)
        where = _auxiliary(indices, [times(above, width)], idtype, "indices")
        idtype = str(where.ty.dtype)
    sizes = [cast(_size(length, idtype), idtype), cast(_size(width, idtype), idtype)]
    promise = [1] if full else []
    return _declare("sparse_fixed", [operand, *sizes, where, int(sorted), int(unique), *promise], idtype)


def times(count: ir.Expr, width: ir.Expr) -> ir.Expr:
    """Return the product, as short as it can be written."""
    return width if isinstance(count, tirx.IntImm) and int(count) == 1 else count * width


def _implicit_width(indices: Any, above: ir.Expr, idtype: str) -> ir.Expr:
    """Return the slots of each fiber, as the number of all indices says."""
    total = _known_size(indices)
    if total is None:
        total = _implicit_count(idtype, f"{getattr(indices, 'name', 'indices')}_count")
        _auxiliary(indices, [total], idtype, "indices")
    if isinstance(above, tirx.IntImm) and int(above) == 1:
        return total
    return total // tirx.max(above, const(1, str(above.ty.dtype)))  # no rows have no slots


def sparse_variable(
    parent: Any,
    shape: Any,
    arrays: Any,
    idtype: str = "int32",
    sorted: bool = True,
    *,
    unique: bool = True,
    full: bool = False,
) -> Var:
    """Return a compressed axis: each parent position has its own stored coordinates (CSR).

    `shape` is ``length`` or ``(length, nnz)``, `arrays` is ``(indptr, indices)``. `indices` may be a callable of the
    ancestors' coordinates, the slot and, if it takes one more, the position; a coordinate outside ``[0, length)`` marks
    an absent slot. `full` promises that all are present.
    """
    idtype = _check_idtype(idtype)
    axis, operand, above = _parent_args(parent)
    length, nnz = _pair(shape, "length or (length, nnz)")
    if not isinstance(arrays, (tuple, list)) or len(arrays) != 2:
        raise VerifyError(f"a sparse_variable axis needs (indptr, indices), got {shown(arrays)}")
    indptr, indices = arrays
    pointers = _auxiliary(indptr, [above + 1], idtype, "indptr")
    if _is_formula(indices):
        idtype = str(pointers.ty.dtype)
        nnz = _implicit_count(idtype, f"{pointers.name}_nnz") if nnz is None else nnz
        where: Any = _rule(indices, _arity(axis), idtype, "indices")
    else:
        if nnz is None:
            nnz = _known_size(indices)
        nnz = _implicit_count(idtype, f"{getattr(indices, 'name', 'indices')}_nnz") if nnz is None else nnz
        where = _auxiliary(indices, [_size(nnz, idtype)], idtype, "indices")
        idtype = str(where.ty.dtype)
    sizes = [cast(_size(length, idtype), idtype), cast(_size(nnz, idtype), idtype)]
    args = [operand, *sizes, pointers, where, int(sorted), int(unique), *([1] if full else [])]
    return _declare("sparse_variable", args, idtype)


def singleton(
    parent: Any,
    length: Any,
    indices: Any,
    idtype: str = "int32",
    sorted: bool = True,
    *,
    unique: bool = True,
    full: bool = False,
) -> Var:
    """Return an axis with exactly one coordinate per parent position: the inner levels of COO.

    `indices` and `full` are those of `sparse_fixed`.
    """
    idtype = _check_idtype(idtype)
    axis, operand, above = _parent_args(parent)
    if isinstance(length, (tuple, list)):
        length = _pair(length, "length")[0]
    if _is_formula(indices):
        where: Any = _rule(indices, _arity(axis), idtype, "indices")
    else:
        where = _auxiliary(indices, [above], idtype, "indices")
        idtype = str(where.ty.dtype)
    promise = [1] if full else []
    args = [operand, cast(_size(length, idtype), idtype), where, int(sorted), int(unique), *promise]
    return _declare("singleton", args, idtype)


def sparse_assembled(parent: Any, length: Any, idtype: str = "int32", sorted: bool = True) -> Var:
    """Return a compressed axis whose coordinates the program computes: its indptr and indices are results.

    Only results lie over it. In the list of an `sp_iter` its variable runs over the coordinates that the body stores.
    """
    idtype = _check_idtype(idtype)
    _, operand, _ = _parent_args(parent)
    if isinstance(length, (tuple, list)):
        raise VerifyError("a sparse_assembled axis takes its length alone: the program computes how much is stored")
    nnz = _implicit_count(idtype, _assembled_name())
    return _declare("sparse_assembled", [operand, cast(_size(length, idtype), idtype), nnz, int(sorted)], idtype)


def _assembled_name() -> str:
    """Return the name of the number of entries of a new assembled axis, which has no handle."""
    count = sum(axis.is_assembled for axis in _scopes.functions[-1].axes.values())
    return f"assembled_nnz_{count}" if count else "assembled_nnz"


def attach(axis: Any, parent: Any) -> Call:
    """Iterate `axis` below the coordinate of `parent` instead of its own parent, in an sp_iter list."""
    base, at = _axis_of(axis, "the attached axis"), _axis_of(parent, "the axis attached to")
    if base.parent is None:
        raise VerifyError(f"axis {base.name} has no parent, there is nothing to re-attach", base.name)
    return dialect.call("attach", [base.var, at.var], base.idtype)


def fuse(*axes: Any) -> Call:
    """Iterate the stored positions of a chain of axes as one loop, in an sp_iter list."""
    chain = [_axis_of(a, "a fused axis") for a in axes]
    if len(chain) < 2:
        raise VerifyError(f"T.fuse takes two axes or more, got {len(chain)}")
    fault = fuse_fault(chain)
    if fault:
        raise VerifyError(fault, chain[0].name)
    return dialect.call("fuse", list(axes), chain[-1].idtype)


def union(*members: Any) -> Call:
    """Iterate every coordinate that one of the axes stores with one variable, in an sp_iter list.

    A member is an axis, or ``T.attach(axis, other)``.
    """
    return _merged("union", members)


def intersect(*members: Any) -> Call:
    """Iterate the coordinates that all of the axes store with one variable, in an sp_iter list.

    A member is an axis, or ``T.attach(axis, other)``.
    """
    return _merged("intersect", members)


def _merged(name: str, members: tuple[Any, ...]) -> Call:
    decoded = [_axis_of(member_axis(m), f"every item of a T.{name}") for m in members]
    fault = merge_fault(name, decoded)
    if fault:
        raise VerifyError(fault, decoded[0].name if decoded else "")
    return dialect.call(name, list(members), merge_domain(decoded).idtype)


def member_axis(item: Any) -> Any:
    """Strip the axis that an item of a list is attached to."""
    return item.args[0] if dialect.is_call(item, "attach") else item


# ---------------------------------------------------------------------------------------------- buffers


def _default(value: Any, dtype: str) -> ir.Expr:
    return tirx.const(0 if value is None else value, dtype) if not isinstance(value, ir.Expr) else value


def _bind_view(storage: Var, name: str, axes: tuple[Axis, ...], dtype: str, default: Any) -> Var:
    shape = [a.length for a in axes]
    view = tirx.decl_buffer(shape, dtype, name=name, layout=None, data_alignment=itemsize(dtype))
    T.add_to_parent(tirx.DeclBuffer(view, data=tirx.buffer_data(storage)))
    args = [view, _default(default, dtype), *(a.var for a in axes)]
    T.evaluate(dialect.call("bind_axes", args))
    _scopes.functions[-1].views[view] = axes
    return view


def _storage_shape(axes: tuple[Axis, ...]) -> list[ir.Expr]:
    from sparsetir.ir.views import SparseBuffer

    return SparseBuffer(axes[0].var, axes[0].var, axes, const(0)).storage_shape


def _buffer_axes(axes: Any) -> tuple[Axis, ...]:
    listed = axes if isinstance(axes, (tuple, list)) else (axes,)
    if not listed:
        raise VerifyError("a sparse buffer needs at least one axis")
    decoded = tuple(_axis_of(a, "every item of a buffer's axes") for a in listed)
    fault = chain_fault(decoded)
    if fault:
        raise VerifyError(fault)
    return decoded


def match_sparse_buffer(
    handle: Any,
    axes: Any,
    dtype: Any = "float32",
    default_value: Any = None,
    *,
    extra_storage: Any = None,
) -> Var:
    """Give the values array `handle` the axes `axes`; absent coordinates read `default_value` (0 if None)."""
    dtype = _check_dtype(dtype)
    decoded = _buffer_axes(axes)
    computed = next((a for a in decoded if a.is_assembled), None)
    if computed is not None and not _is_handle(handle):
        message = f"a result over {computed.name} is a T.handle parameter, got {_shown(handle)}"
        raise VerifyError(f"{message}: the program computes how many values there are", computed.name)
    if extra_storage is not None:
        raise VerifyError("extra_storage belongs to auxiliary arrays, which this dialect declares on the axis")
    if tirx.is_buffer_var(handle):
        storage, name = handle, f"{handle.name}_view"
        if str(storage.ty.dtype) != dtype:
            raise VerifyError(f"buffer {handle.name} holds {storage.ty.dtype}, match_sparse_buffer says {dtype}")
    elif not _is_handle(handle):
        raise VerifyError(f"match_sparse_buffer takes a T.handle or T.Buffer parameter, got {_shown(handle)}")
    elif handle not in _scopes.functions[-1].matched:
        shape = _storage_shape(decoded)
        storage, name = T.match_buffer(handle, shape, dtype, align=itemsize(dtype)), str(handle.name)
        IRBuilder.name(str(handle.name), storage)
        _scopes.functions[-1].matched[handle] = storage
    else:
        message = f"the handle {handle.name} is already matched to another buffer"
        raise VerifyError(f"{message}; declare it as T.Buffer to view it twice", str(handle.name))
    return _bind_view(storage, name, decoded, dtype, default_value)


def alloc_sparse_buffer(
    axes: Any,
    dtype: Any = "float32",
    scope: str = "global",
    default_value: Any = None,
) -> Var:
    """Return a scratch buffer over `axes`, alive during the call."""
    dtype = _check_dtype(dtype)
    decoded = _buffer_axes(axes)
    computed = next((a for a in decoded if a.is_assembled), None)
    if computed is not None:
        message = f"scratch over the assembled axis {computed.name} is not supported: its size is known after the run"
        raise VerifyError(f"{message}; match a T.handle parameter, which is a result", computed.name)
    storage = T.alloc_buffer(_storage_shape(decoded), dtype, scope=scope)
    storage = storage if tirx.is_buffer_var(storage) else storage.__enter__()
    count = len(_scopes.functions[-1].views)
    IRBuilder.name(f"scratch_{count}", storage)
    return _bind_view(storage, f"alloc_{count}", decoded, dtype, default_value)


def _match_buffer(param: Any, shape: Any = None, dtype: Any = "float32", *args: Any, **kwargs: Any) -> Var:
    """Call T.match_buffer, or `match_sparse_buffer` for a tuple of axes."""
    if _is_axes(shape):
        return match_sparse_buffer(param, shape, dtype, *args, **kwargs)
    buffer = T.match_buffer(param, shape, dtype, *args, **kwargs)
    if isinstance(param, Var):
        _scopes.functions[-1].matched[param] = buffer
    return buffer


def _alloc_buffer(shape: Any, dtype: Any = "float32", *args: Any, **kwargs: Any) -> Any:
    """Call T.alloc_buffer, or `alloc_sparse_buffer` for a tuple of axes."""
    if _is_axes(shape):
        return alloc_sparse_buffer(shape, dtype, *args, **kwargs)
    return T.alloc_buffer(shape, dtype, *args, **kwargs)


def _is_axes(shape: Any) -> bool:
    items = list(shape) if isinstance(shape, (tuple, list)) else [shape]
    is_axis = [isinstance(s, Var) and s in _scopes.functions[-1].axes for s in items]
    if any(is_axis) and not all(is_axis):
        axis, size = items[is_axis.index(True)], items[is_axis.index(False)]
        message = f"a buffer lies over axes or has sizes, got the size {size} beside axis {axis.name}"
        raise VerifyError(f"{message}: declare an axis T.dense_fixed({size}) and list it")
    return bool(items) and all(is_axis)


def stored(value: Any) -> Any:
    """Return a value that a program stores; raise unless it is a number."""
    if value is None:
        raise VerifyError("the value stored is None; a function that is called here must return an expression")
    if not isinstance(value, Var):
        return value
    if value in _scopes.functions[-1].axes:
        raise VerifyError(f"{value.name} is an axis, not a number; store a variable of an sp_iter over it")
    if tirx.is_buffer_var(value):
        raise VerifyError(f"the value stored is the whole buffer {value.name}; give one subscript for each axis")
    return value


# ---------------------------------------------------------------------------------------------- iterations


def _entries(axes: Any) -> list[tuple[Axis, Call]]:
    """Return each iteration variable's axis and binding, in list order."""
    if not isinstance(axes, (tuple, list)) or not axes:
        raise VerifyError("sp_iter takes a list of one axis or more")
    out: list[tuple[Axis, Call]] = []
    for item in axes:
        if dialect.is_call(item, "fuse"):
            members = [_axis_of(a, "a fused axis") for a in item.args]
            out += [(a, dialect.call("coord", [item, k], a.idtype)) for k, a in enumerate(members)]
            continue
        if dialect.is_call(item, *dialect.MERGES):
            axis = merge_domain([_axis_of(member_axis(m), "a member") for m in item.args])
        else:
            axis = _axis_of(member_axis(item), "every item of an sp_iter list")
        out.append((axis, dialect.call("coord", [item, 0], axis.idtype)))
    return out


def _check_kinds(kinds: Any, count: int) -> str:
    if not isinstance(kinds, str):
        raise VerifyError(f"the kinds of an sp_iter are a string of S and R, got {shown(kinds)}")
    wrong = [c for c in kinds if c not in "SR"]
    if wrong:
        raise VerifyError(f"each letter of an sp_iter is S (spatial) or R (reduction), got {wrong[0]!r} in {kinds!r}")
    if len(kinds) != count:
        raise VerifyError(f"sp_iter iterates {count} axes but {kinds!r} has {len(kinds)} letters; give one per axis")
    return kinds


def _unique_name(name: str) -> str:
    names = _scopes.functions[-1].names
    base = name or "sp_iter"
    candidate, k = (base, 0) if name else (f"{base}_0", 0)
    while candidate in names:
        k += 1
        candidate = f"{base}_{k}"
    names.add(candidate)
    return candidate


class _SparseIteration:
    """The context manager behind ``with T.sp_iter(...) as [...]``."""

    def __init__(self, axes: Any, kinds: str, name: str) -> None:
        self.entries = _entries(axes)
        self.kinds = _check_kinds(kinds, len(self.entries))
        self.name = _unique_name(name)
        self.stack = contextlib.ExitStack()

    def __enter__(self) -> list[Var]:
        self.stack.enter_context(T.sblock(self.name))
        T.sblock_attr({SPARSE_ITER: self.kinds})
        T.reads()  # regions are computed when the positions are known
        T.writes()
        out = []
        for (axis, binding), kind in zip(self.entries, self.kinds, strict=True):
            make = T.axis.spatial if kind == "S" else T.axis.reduce
            out.append(make(axis.length, binding, dtype=axis.idtype))
        return out

    def __exit__(self, *exc: Any) -> Any:
        return self.stack.__exit__(*exc)


def sp_iter(axes: Any, kinds: str, name: str = "") -> _SparseIteration:
    """Iterate the stored coordinates of `axes`; `kinds` has one letter per axis, S spatial or R reduction."""
    return _SparseIteration(axes, kinds, name)


def sp_iter_attr(attrs: dict[str, Any]) -> None:
    """Annotate the enclosing sp_iter. ``{"search": "inline" | "hoist" | "merge"}`` chooses the search."""
    frames = IRBuilder.current().frames
    if not frames or not isinstance(frames[-1], T.frame.SBlockFrame):
        raise VerifyError("T.sp_iter_attr belongs at the top of an sp_iter, got a call outside of one")
    search = attrs.get("search", "inline")
    if search not in SEARCHES:
        raise VerifyError(f"the search of an sp_iter is one of {', '.join(SEARCHES)}, got {shown(search)}")
    T.sblock_attr(attrs)


# ---------------------------------------------------------------------------------------------- raw forms


def _raw(value: Any) -> Any:
    """Convert an operand in the form of TVM's printer, where strings denote string constants."""
    return ir.StringImm(value) if isinstance(value, str) else value


def _raw_axis(kind: str, *args: Any) -> Var:
    """Return an axis from its operator's own arguments."""
    operands = [_raw(a) for a in args]
    length = operands[0] if kind == "dense_fixed" else operands[1]
    return _declare(kind, operands, str(length.ty.dtype) if isinstance(length, ir.Expr) else "int32")


def _raw_coord(target: Any, member: int) -> Call:
    axis = target.args[int(member)] if dialect.is_call(target, "fuse") else member_axis(target)
    return dialect.call("coord", [target, member], str(axis.ty.dtype))


def _raw_bind_axes(view: Var, default: Any, *axes: Any) -> Call:
    _scopes.functions[-1].views[view] = tuple(_axis_of(a, "a buffer axis") for a in axes)
    return dialect.call("bind_axes", [view, _default(default, str(view.ty.dtype)), *axes])


def _raw_find(name: str) -> Callable[..., Call]:
    def find(*args: Any) -> Call:
        operands = [_raw(a) for a in args]
        typed = operands[1 if name == "find_union" else 0]
        return dialect.call(name, operands, str(typed.ty.dtype))

    return find


class sp:
    """The RFC's names, and the operators as TVM's own printer shows them."""

    dense_fixed = staticmethod(dense_fixed)
    dense_varied = staticmethod(dense_variable)
    compressed_fixed = staticmethod(sparse_fixed)
    compressed_varied = staticmethod(sparse_variable)
    singleton = staticmethod(singleton)
    sparse_assembled = staticmethod(sparse_assembled)
    attach = staticmethod(attach)
    fuse = staticmethod(fuse)
    union = staticmethod(union)
    intersect = staticmethod(intersect)
    match_buffer = staticmethod(match_sparse_buffer)
    alloc_buffer = staticmethod(alloc_sparse_buffer)
    iteration = staticmethod(sp_iter)
    iteration_attr = staticmethod(sp_iter_attr)

    axis = staticmethod(_raw_axis)
    root = staticmethod(lambda: dialect.call("root", []))
    arg = staticmethod(lambda dtype, k: dialect.call("arg", [k], dtype))
    coord = staticmethod(_raw_coord)
    bind_axes = staticmethod(_raw_bind_axes)
    find = staticmethod(_raw_find("find"))
    find_rule = staticmethod(_raw_find("find_rule"))
    find_fiber = staticmethod(_raw_find("find_fiber"))
    find_union = staticmethod(_raw_find("find_union"))


class _Float64(T.DtypeConstructor):
    """``T.float64``; TVM's own refuses numbers beyond the range of float32."""

    def __call__(self, expr: Any = None) -> Any:
        is_number = isinstance(expr, (int, float, str)) and not isinstance(expr, bool)
        return tirx.const(float(expr), "float64") if is_number else super().__call__(expr)


#: besides what this module defines: names of TVM's that mean more here, and upstream's older ones
EXTRA: dict[str, Any] = {
    "iter": sp_iter,
    "iter_attr": sp_iter_attr,
    "match_buffer": _match_buffer,
    "alloc_buffer": _alloc_buffer,
    "float64": _Float64("Float64", "float64"),
}


__all__ = [
    "FUNCTIONS",
    "alloc_sparse_buffer",
    "attach",
    "dense_fixed",
    "dense_variable",
    "fuse",
    "intersect",
    "match_sparse_buffer",
    "singleton",
    "sp",
    "sp_iter",
    "sp_iter_attr",
    "sparse_assembled",
    "sparse_fixed",
    "sparse_variable",
    "union",
]
