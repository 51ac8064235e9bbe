"""The table of deaths, and how answers to them are graded: ours and NVRx's."""

from __future__ import annotations

import pytest

from ddp_hpc.watch.why.signatures import REGISTRY
from tests.campaigns.deaths.blind import BLIND
from tests.campaigns.deaths.peer import MEANS, Said
from tests.campaigns.deaths.table import ON_CLUSTER, ON_MACHINE, Death
from tests.campaigns.why import Answer

CRASH = Death(how="segfault", workload="script", failure="native-crash", rank=1)
PORT = Death(how="port", workload="script", failure="port", rank=1)
HANG = Death(how="gil", workload="script", failure="hang-behind", rank=1, less="hang")


def test_every_death_has_a_name_of_its_own_and_right_answers_of_the_registry() -> None:
    deaths = [*ON_MACHINE, *ON_CLUSTER, *BLIND]

    assert len({one.name for one in deaths}) == len(deaths) >= 240
    assert {name for one in deaths for name in one.true} <= REGISTRY.keys()
    assert {name for names in MEANS.values() for name in names} <= REGISTRY.keys()


@pytest.mark.parametrize(
    ("death", "said", "rank", "grade", "rank_grade"),
    [
        (CRASH, "native-crash", 1, "right", "right"),
        (CRASH, "unknown", 1, "abstained", "right"),
        (CRASH, "peer-gone", None, "wrong", "abstained"),
        (CRASH, "killed", 0, "wrong", "wrong"),
        (HANG, "hang", None, "right", "abstained"),
    ],
)
def test_an_answer_is_right_wrong_or_abstained(
    death: Death, said: str, rank: int | None, grade: str, rank_grade: str
) -> None:
    answer = Answer(death=death, said=said, rank=rank, made="")

    assert (answer.grade, answer.rank_grade) == (grade, rank_grade)


@pytest.mark.parametrize(
    ("death", "failure", "quote", "grade"),
    [
        (PORT, "observed_exception", "OSError: [Errno 98] Address already in use", "right"),
        (PORT, "observed_exception", "RuntimeError: [gloo/pair.cc:561] Connection closed by peer", "wrong"),
        (CRASH, "observed_exception", "KeyError: 'x'", "wrong"),
        (CRASH, "observed_exception", "rank 1 on node1: killed by SIGSEGV", "right"),
        (CRASH, "framework_crash", "", "right"),
        (CRASH, "", "", "abstained"),
        (CRASH, "a class of tomorrow", "", "wrong"),
    ],
)
def test_each_answer_of_nvrx_that_is_not_wrong_is_right(death: Death, failure: str, quote: str, grade: str) -> None:
    assert Said(failure=failure, quote=quote, rank="", decision="RESTART").grade(death) == grade
