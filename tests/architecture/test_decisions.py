"""What follows an attempt, and whose fault it was, is decided by fields: no decision looks into a text written for people."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import ddp_hpc

PACKAGE = Path(ddp_hpc.__file__).parent
DECIDING = [PACKAGE / "run" / "requeue.py", *sorted((PACKAGE / "job").rglob("*.py"))]

PROSE = {"exception", "traceback", "stacks", "reason"}
"""Fields of our records that hold text for people. `job.reason` is none: there Slurm gives one of its codes."""
LOOKS = {
    *("startswith", "endswith", "removeprefix", "removesuffix", "find", "rfind", "index", "rindex", "count"),
    *("partition", "rpartition", "split", "rsplit", "splitlines"),
}
SEARCHES = {"search", "match", "fullmatch", "findall", "finditer"}
PASSES = {"strip", "lower", "upper", "casefold", "replace", "lstrip", "rstrip"}
"""Methods whose result is the same text still."""


def looks_into_prose(source: str) -> list[int]:
    """Return the lines in which a text for people is looked into."""
    tree = ast.parse(source)
    functions = [
        node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
    ]
    return sorted({line for function in functions for line in _looks_in(function)})


def _looks_in(function: ast.AST) -> Iterator[int]:
    nodes = list(ast.walk(function))
    names: set[str] = set()
    for node in nodes:
        names |= _named_prose(node, names)
    for node in nodes:
        if isinstance(node, ast.Compare | ast.Call | ast.Match) and _is_look(node, names):
            yield node.lineno


def _named_prose(node: ast.AST, names: set[str]) -> set[str]:
    """Return the names by which this statement makes a text for people known."""
    match node:
        case ast.ExceptHandler(name=str(name)):
            return {f"str({name})"}
        case ast.Assign(targets=[ast.Name(id=name)], value=value) if _is_prose(value, names):
            return {name}
        case ast.NamedExpr(target=ast.Name(id=name), value=value) if _is_prose(value, names):
            return {name}
    return set()


def _is_look(node: ast.AST, names: set[str]) -> bool:
    match node:
        case ast.Compare(left=left, comparators=others):
            sides = [left, *others]
            asks_for_any = any(isinstance(side, ast.Constant) and side.value in ("", None) for side in sides)
            return not asks_for_any and any(_is_prose(side, names) for side in sides)
        case ast.Call(func=ast.Attribute(attr=method), args=arguments) if method in SEARCHES:
            return any(_is_prose(argument, names) for argument in arguments)
        case ast.Call(func=ast.Attribute(value=text, attr=method)):
            return method in LOOKS and _is_prose(text, names)
        case ast.Match(subject=subject):
            return _is_prose(subject, names)
    return False


def _is_prose(node: ast.AST, names: set[str]) -> bool:
    found = False
    match node:
        case ast.Attribute(value=ast.Name(id="job") | ast.Attribute(attr="job"), attr="reason"):
            found = False
        case ast.Attribute(attr=name):
            found = name in PROSE
        case ast.Name(id=name):
            found = name in names
        case ast.Call(func=ast.Name(id="str"), args=[ast.Name(id=name)]):
            found = f"str({name})" in names
        case ast.Call(func=ast.Attribute(value=text, attr=method)):
            found = method in PASSES and _is_prose(text, names)
        case ast.Subscript(value=text) | ast.FormattedValue(value=text):
            found = _is_prose(text, names)
        case ast.BoolOp(values=parts) | ast.JoinedStr(values=parts):
            found = any(_is_prose(part, names) for part in parts)
    return found


def test_no_decision_looks_into_a_text_for_people() -> None:
    found = [(str(path), line) for path in DECIDING for line in looks_into_prose(path.read_text(encoding="utf-8"))]

    assert found == [], "these lines look into a text for people; give the record a field for what they ask"


@pytest.mark.parametrize(
    "body",
    [
        "return failure.exception.startswith('killed by ')",
        "said = failure.exception\n    return said.startswith('killed by ')",
        "said = failure.exception.lower()\n    return any(text in said for text in TEXTS)",
        "return any(BUILDING in stand.stacks for stand in stands)",
        "return 'CUDA error' not in failure.traceback",
        "return newest.reason == 'cancelled by the user'",
        "return newest.reason[:6] == 'killed'",
        "return newest.reason.partition(';')[0]",
        "return re.search('killed', failure.exception)",
        "return KILLED.match(f'{failure.rank} {failure.exception}')",
        "match outcome.reason:\n        case 'killed':\n            return 1",
        "if (said := failure.exception) and 'killed' in said:\n        return 1",
        "try:\n        pass\n    except OSError as error:\n        return 'denied' in str(error)",
    ],
)
def test_the_guard_sees_each_kind_of_look(body: str) -> None:
    """A guard that cannot fail guards nothing."""
    assert looks_into_prose(f"def f(failure, newest, outcome):\n    {body}\n") != []


@pytest.mark.parametrize(
    "body",
    [
        "return failure.signal is not None",
        "return failure.exception if failure.is_input_error else f'rank {failure.rank}: {failure.exception}'",
        "return '; '.join(part for part in (outcome.reason, decision.why) if part)",
        "return CAUSES_BY_REASON.get(job.reason, PREEMPTED)",
        "return job.reason in CAUSES_BY_REASON or evidence.job.reason == 'NodeDown'",
        "return bool(outcome.reason) and outcome.reason != ''",
        "return failure.phase == 'building'",
        "return str(path).startswith('/')",
    ],
)
def test_the_guard_lets_fields_and_codes_pass(body: str) -> None:
    assert looks_into_prose(f"def f(failure, outcome, decision, job, evidence):\n    {body}\n") == []
