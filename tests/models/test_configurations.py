"""Memories with a name."""

import pytest

from dla.choices import NAMED, spelled_out
from dla.models import CONFIGURATIONS, DLAConfig, preset
from dla.models.config import MEMORIES
from dla.models.info import variants


def test_the_paper_is_what_the_defaults_compute():
    named, plain = preset("gdn-tiny", "paper"), preset("gdn-tiny", "dynamic")
    assert named.to_dict() == plain.to_dict()
    assert (named.capacity, named.tau, named.merge, named.score) == (30, 0.6, "density", "token")
    assert (named.slot_order, named.routed) == ("chronological", False)


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_a_preset_has_all_options_of_the_name(name):
    config = preset("mamba2-tiny", name)
    assert {option: getattr(config, option) for option in CONFIGURATIONS[name]} == CONFIGURATIONS[name]


def test_what_is_given_counts_more_than_the_name():
    assert preset("gdn-tiny", "recommended", capacity=5, tau=1.0).to_diff_dict()["capacity"] == 5
    assert spelled_out({"tau": 0.1, "memory": "paper"}) == {**CONFIGURATIONS["paper"], "tau": 0.1}


def test_other_memories_are_left_as_they_are():
    for memory in MEMORIES:
        assert spelled_out({"memory": memory, "tau": 0.1}) == {"memory": memory, "tau": 0.1}
    assert spelled_out({}) == {}


def test_names_are_no_memories_of_their_own():
    assert not set(CONFIGURATIONS) & set(MEMORIES)
    with pytest.raises(ValueError, match="memory"):
        DLAConfig(memory="recommended")


def test_the_command_line_knows_them_all():
    assert (*MEMORIES, *CONFIGURATIONS) == NAMED


@pytest.mark.parametrize("memory", NAMED)
def test_costs_of_a_named_memory(memory):
    recommended = preset("gdn-tiny", "recommended", capacity=7)
    assert variants(recommended, [memory])[memory].to_dict() == preset("gdn-tiny", memory).to_dict() | (
        {"capacity": 7} if memory in MEMORIES else {}
    ) | ({"routed": True, "sharpness": "token"} if memory == "dynamic" else {})
