"""What a script's source says: whether its process needs PyTorch or its compiler, and where its ranks meet. Pure."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

_READ_AT_IMPORT_PATTERN = re.compile(
    r"(?:CUDA|HIP|ROCR|OMP|GOMP|MKL|KMP|OPENBLAS|BLIS|NUMEXPR|TORCH|PYTORCH|TORCHINDUCTOR)_\w+"
)
"""Variables that PyTorch and its libraries read when they are loaded, or may read then."""
_SETTERS = frozenset({"setdefault", "putenv", "update"})
_START_METHOD_SETTER = "set_start_method"
_COMPILER_PATTERN = re.compile(
    r"(?<!\bre)\.compile\b|\bimport compile\b|_dynamo|_inductor"
    r"|\b(?:lightning|pytorch_lightning|transformers|accelerate|diffusers|trl|peft|torchao|torchtune|deepspeed)\b"
)
"""What compiles, and libraries that import PyTorch's compiler (`torch._dynamo`) with themselves."""

_PYTHON_ENDPOINT_PATTERN = re.compile(
    r"""environ\s*\[\s*["']MASTER_(?:ADDR|PORT)["']\s*\]\s*=(?!=)|(?:setdefault|putenv|update)\([^)]*MASTER_(?:ADDR|PORT)\b"""
)
_SHELL_ENDPOINT_PATTERN = re.compile(r"^[^#]*\bMASTER_(?:ADDR|PORT)=", re.MULTILINE)


def why_not_fork(source: str) -> str:
    """Return why a script needs a process that has not imported PyTorch yet; empty where it does not, or cannot be read."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return ""  # Python itself reports it when the script starts
    torch_line = min((getattr(node, "lineno", 0) for node in ast.walk(tree) if _imports_torch(node)), default=None)
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        if torch_line is not None and line >= torch_line:
            continue
        for what in _describe_early_acts(node):
            return f"line {line} of the script {what} before it imports torch"
    return ""


def early_imports(source: bytes) -> Iterator[tuple[int, str]]:
    """Yield line and name of each package that a script imports before it calls anything, which may install others.

    Raises:
        SyntaxError: where this Python cannot read the source.
    """
    for node in ast.parse(source).body:
        is_definition = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        if not is_definition and any(isinstance(part, ast.Call) for part in ast.walk(node)):
            return
        match node:
            case ast.Import(names=names):
                yield from ((node.lineno, one.name.partition(".")[0]) for one in names)
            case ast.ImportFrom(module=str(module), level=0):
                yield node.lineno, module.partition(".")[0]


def may_compile(source: str) -> bool:
    """Tell whether a script seems to use PyTorch's compiler, itself or through a library."""
    return _COMPILER_PATTERN.search(source) is not None


def sets_endpoint(source: str, *, is_shell: bool = False) -> bool:
    """Tell whether a script sets MASTER_ADDR or MASTER_PORT itself, always or in some case."""
    return (_SHELL_ENDPOINT_PATTERN if is_shell else _PYTHON_ENDPOINT_PATTERN).search(source) is not None


def imported_names(source: str) -> Iterator[str]:
    """Yield the names of what a script imports, of which some may be no modules but what these hold."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                yield from (name.name for name in names)
            case ast.ImportFrom(module=str(module), names=names, level=0):
                yield from (module, *(f"{module}.{name.name}" for name in names))


def _imports_torch(node: ast.AST) -> bool:
    match node:
        case ast.Import(names=names):
            return any(name.name.partition(".")[0] == "torch" for name in names)
        case ast.ImportFrom(module=str(module), level=0):
            return module.partition(".")[0] == "torch"
    return False


def _describe_early_acts(node: ast.AST) -> Iterator[str]:
    """Yield what a node does that has to come before PyTorch's import."""
    match node:
        case ast.Assign(targets=targets):
            for target in targets:
                match target:
                    case ast.Subscript(value=owner, slice=ast.Constant(value=str(name))) if _is_environ(owner):
                        yield from _describe_setting(name)
        case ast.Call(func=ast.Attribute(attr="update", value=owner), args=args, keywords=words) if _is_environ(owner):
            keys = (key for each in args if isinstance(each, ast.Dict) for key in each.keys)
            names = [key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str)]
            for name in [*names, *(word.arg for word in words if word.arg)]:
                yield from _describe_setting(name)
        case ast.Call(func=ast.Attribute(attr=called), args=[ast.Constant(value=str(name)), *_]) if called in _SETTERS:
            yield from _describe_setting(name)
        case ast.Call(func=ast.Attribute(attr=called) | ast.Name(id=called)) if called == _START_METHOD_SETTER:
            yield f"calls `{_START_METHOD_SETTER}`"


def _describe_setting(name: str) -> Iterator[str]:
    if _READ_AT_IMPORT_PATTERN.fullmatch(name):
        yield f"sets {name}"


def _is_environ(node: ast.AST) -> bool:
    match node:
        case ast.Name(id="environ") | ast.Attribute(attr="environ"):
            return True
    return False
