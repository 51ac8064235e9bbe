"""The first value in which two traces differ, in the order in which values follow from each other."""

from __future__ import annotations

from typing import Any

from ddp_hpc.prove.replay.bisecting import trace_by_step
from ddp_hpc.prove.replay.first_difference import EntriesByStep, first_difference


def tensor(kind: str, name: str, seal: str = "a", **more: Any) -> dict[str, Any]:
    return {"kind": kind, "name": name, "hash": seal, "type": "float32[2]", "norm": 1.5, **more}


def option(name: str, value: str) -> dict[str, Any]:
    return {"kind": "option", "name": name, "hash": value}


def step(*entries: dict[str, Any]) -> EntriesByStep:
    return {3: entries}


def test_equal_traces_have_no_difference() -> None:
    assert first_difference([step(tensor("loss", "loss"))], [step(tensor("loss", "loss"))]) is None


def test_the_value_that_is_computed_first_is_named_though_later_ones_differ_too() -> None:
    one = step(tensor("output", "fc"), tensor("loss", "loss"), tensor("weight", "fc.weight"))
    other = step(tensor("output", "fc"), tensor("loss", "loss", "b"), tensor("weight", "fc.weight", "b"))

    parting = first_difference([one], [other])

    assert parting is not None
    assert (parting.first.step, parting.first.kind, parting.first.how) == (3, "loss", "differs")
    assert parting.first.one == "float32[2], norm 1.5"


def test_an_option_is_named_with_the_first_tensor_that_follows_from_it() -> None:
    one = step(option("group 0, lr", "0.1"), tensor("moment", "fc/exp_avg"), tensor("weight", "fc"))
    other = step(option("group 0, lr", "0.2"), tensor("moment", "fc/exp_avg"), tensor("weight", "fc", "b"))

    parting = first_difference([one], [other])

    assert parting is not None
    assert parting.tensor is not None
    assert (parting.first.name, parting.first.one, parting.first.other) == ("group 0, lr", "0.1", "0.2")
    assert parting.tensor.kind == "weight"


def test_a_value_that_only_one_run_has_is_named_where_that_run_has_it() -> None:
    both, more = [tensor("gradient", "c"), tensor("gradient", "a")], tensor("gradient", "b")

    only_first = first_difference([step(both[0], more, both[1])], [step(*both)])
    only_second = first_difference([step(*both)], [step(both[0], more, {**both[1], "hash": "z"})])

    assert only_first is not None
    assert only_second is not None
    assert (only_first.first.name, only_first.first.how) == ("b", "only in the first")
    assert (only_second.first.name, only_second.first.how) == ("b", "only in the second")


def test_a_module_that_is_called_twice_is_named_with_its_call() -> None:
    one = step(tensor("output", "fc"), tensor("output", "fc"))
    other = step(tensor("output", "fc"), tensor("output", "fc", "b"))

    parting = first_difference([one], [other])

    assert parting is not None
    assert parting.first.name == "fc (call 2)"


def test_the_samples_of_a_batch_that_differ_are_named_by_their_ids() -> None:
    samples = {"kind": "samples", "name": "micro batch 0", "hash": "[7, 9]", "ids": [7, 9]}
    one = step(samples, tensor("batch", "inputs", rows=["p", "q"]))
    other = step(samples, tensor("batch", "inputs", "b", rows=["p", "r"]))

    parting = first_difference([one], [other])

    assert parting is not None
    assert parting.first.samples == [9]


def test_of_several_ranks_the_one_is_named_whose_value_is_computed_first() -> None:
    equal = step(tensor("gradient", "w"), tensor("summed gradient", "w"))
    late = step(tensor("gradient", "w"), tensor("summed gradient", "w", "b"))
    early = step(tensor("gradient", "w", "b"), tensor("summed gradient", "w", "b"))

    parting = first_difference([equal, equal], [late, early])

    assert parting is not None
    assert (parting.first.rank, parting.first.kind, sorted(parting.ranks)) == (1, "gradient", [0, 1])


def test_another_type_differs_even_if_the_bytes_do_not() -> None:
    one, other = tensor("output", "fc"), {**tensor("output", "fc"), "type": "bfloat16[4]"}

    assert first_difference([step(one)], [step(other)]) is not None


def test_the_state_that_a_part_of_a_replay_begins_with_does_not_hide_what_the_step_before_computed() -> None:
    state, samples = tensor("weight", "fc"), {"kind": "samples", "name": "micro batch 0", "hash": "[1]", "ids": [1]}
    whole = [{"step": number, "entries": [samples, state]} for number in (12, 13, 14)]
    begin = {"step": 13, "entries": [state]}

    in_parts, at_once = trace_by_step([*whole[:2], begin, whole[2]]), trace_by_step(whole)

    assert first_difference([in_parts], [at_once]) is None
    assert trace_by_step([begin, whole[2]]) == {13: [state], 14: [samples, state]}
