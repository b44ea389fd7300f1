"""The configurations that ship: each can be described, and fits the GPUs that it is for; published sizes are met."""

import pytest

from evenload.models import ParameterCount
from evenload.train.config_file import load_config, packaged
from evenload.train.describe import describe

GIB = 2**30
# The number of ranks that a configuration is for, and the memory of their GPUs, of which a tenth is for what is not counted.
MEANT_FOR = {
    "tiny": (1, 1),
    "findings": (1, 1),
    "small": (1, 80),
    "medium": (8, 80),
    "eqb_7b5": (8, 80),
    "kolibri_78b": (64, 80),
}


def count(name: str) -> ParameterCount:
    return load_config(name).model.num_parameters()


def test_every_packaged_configuration_is_tested() -> None:
    assert set(MEANT_FOR) == set(packaged())


@pytest.mark.parametrize("name", packaged())
def test_fits_the_gpus_it_is_for(name: str) -> None:
    world, memory = MEANT_FOR[name]
    description = describe(load_config(name), world)
    assert sum(description.peak.values()) < 0.9 * memory * GIB
    assert (sum(description.size.total.values()), sum(description.size.active.values())) == count(name)
    assert len(description.table().splitlines()) <= 45


def test_kolibri_has_its_published_size() -> None:
    model, size = load_config("kolibri_78b").model, count("kolibri_78b")
    assert f"{size.total / 1e9:.1f}B, {size.active / 1e9:.2f}B" == "78.1B, 3.46B"
    # The model card counts EQB's biases as parameters, and the looked-up row of the input embedding as active.
    biases = model.num_layers * model.num_experts
    assert size.total + biases == 78_103_074_560
    assert size.active + biases + model.d_model == 3_457_573_120


def test_eqb_7b5_has_its_published_size() -> None:
    config = load_config("eqb_7b5")
    assert f"{count('eqb_7b5').total / 1e9:.1f}B" == "7.5B"
    assert (config.model.num_experts, config.model.top_k) == (256, 6)
    assert config.run.steps * config.run.batch * config.run.seq_len == pytest.approx(100e9, rel=0.01)


@pytest.mark.parametrize(("name", "active"), [("small", 0.1e9), ("medium", 1e9)])
def test_sizes_are_what_the_names_promise(name: str, active: float) -> None:
    assert count(name).active == pytest.approx(active, rel=0.1)
