"""Proves of a data set that reading a sample reads no random generator, so that it needs no seed."""

from __future__ import annotations

import dis
import inspect
from types import CodeType, FunctionType

import numpy as np
from torch import Tensor
from torch.utils.data import ConcatDataset, Subset, TensorDataset

_CALL_FREE_OPCODES = {
    *("RESUME", "NOP", "LOAD_FAST", "LOAD_FAST_BORROW", "LOAD_CONST", "LOAD_SMALL_INT", "LOAD_ATTR", "STORE_FAST"),
    *("BUILD_TUPLE", "BUILD_LIST", "BUILD_MAP", "BUILD_CONST_KEY_MAP", "BUILD_SLICE"),
    *("BINARY_SUBSCR", "BINARY_SLICE", "BINARY_OP", "RETURN_VALUE"),
}
"""Instructions that run no code but that of the values they are given. One that is missing, as of a later Python, is taken for a call."""
_NUMERIC_KINDS = "biufc"
"""Kinds of numpy arrays without objects: https://numpy.org/doc/stable/reference/generated/numpy.dtype.kind.html"""


def reads_no_generator(dataset: object) -> bool:
    """Tell whether it is proved that `dataset[index]` neither draws a random number nor asks for a seed.

    It is proved for PyTorch's data sets of tensors, and for a class that indexes its tensors and arrays and computes with
    them, without a call: `return self.images[index] / 255, self.labels[index]`. To watch whether a generator moves would prove
    nothing: `torch.initial_seed()` and `random.getstate()` read one without moving it.
    """
    kind = type(dataset)
    if isinstance(dataset, TensorDataset) and kind is TensorDataset:
        return all(map(_is_numbers, dataset.tensors))
    if isinstance(dataset, Subset) and kind is Subset:
        indices = dataset.indices
        are_whole = type(indices) in (list, range) and all(type(one) is int for one in indices)
        return (are_whole or _is_numbers(indices)) and reads_no_generator(dataset.dataset)
    if isinstance(dataset, ConcatDataset) and kind is ConcatDataset:
        return all(map(reads_no_generator, dataset.datasets))
    read = getattr(kind, "__getitem__", None)
    if type(read) is not FunctionType or kind.__getattribute__ is not object.__getattribute__:
        return False
    own = getattr(dataset, "__dict__", {})
    # An attribute of the class may be a property, which is code.
    return _only_computes(read.__code__) and all(
        _is_numbers(own.get(name)) and not hasattr(kind, name) for name in read.__code__.co_names
    )


def _is_numbers(value: object) -> bool:
    is_array = type(value) is np.ndarray and value.dtype.kind in _NUMERIC_KINDS
    return is_array or type(value) in (Tensor, int, float)


def _only_computes(code: CodeType) -> bool:
    """Tell whether a method of `self` and an index calls nothing, and takes attributes of `self` alone."""
    if code.co_argcount != 2 or code.co_kwonlyargcount or code.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS):
        return False
    is_self = False  # what the last instruction loads
    for one in dis.get_instructions(code):
        # Of `self`, which is the user's, nothing but attributes: `self + 1` may be code.
        if one.opname not in _CALL_FREE_OPCODES or is_self != (one.opname == "LOAD_ATTR"):
            return False
        is_self = one.opname.startswith("LOAD_FAST") and one.argval == code.co_varnames[0]
        if one.opname == "STORE_FAST" and one.argval == code.co_varnames[0]:
            return False
    return True
