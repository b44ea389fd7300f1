"""What `describe` says of a configuration is what a real run of it holds and sends, on any layout."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import Ranks
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.flop_counter import FlopCounterMode

from evenload.balancers import balance_step
from evenload.models import GPT, GPTConfig
from evenload.train import ConfigError, cli, describe_step, train_step
from evenload.train.config import Config, ParallelConfig, RunConfig
from evenload.train.describe import Description, describe
from evenload.train.describe_size import measure_size
from evenload.train.layout import Layout
from evenload.train.mixture import Batch
from evenload.train.optim import local, make_optimizer
from evenload.train.parallel import build_sharded, make_meshes
from evenload.train.step import accumulate, tolerate_nan
from evenload.train.world import World

ITEM_BYTES = {"float": 4, "double": 8, "long int": 8, "c10::BFloat16": 2}


def small(layout: Layout, mode: str = "none", precision: str = "fp32", **model: Any) -> Config:
    shape = {
        "vocab_size": 512, "d_model": 64, "num_layers": 3, "num_heads": 4, "num_kv_heads": 2, "num_experts": 8, "top_k": 2,
        "expert_hidden": 96, "shared_hidden": 32, "num_dense_layers": 1, "loss_chunk": 64, "balancers": "eqb+lei",
    } | model  # fmt: skip
    run = RunConfig(seq_len=64, batch=64, microbatch=8, precision=precision, activation_checkpointing=mode)
    parallel = ParallelConfig(layout.dp_replicate, layout.dp_shard, layout.ep)
    return Config(model=GPTConfig(**shape), run=run, parallel=parallel)


def real_step(rank: int, group: object, config: Config) -> dict[str, Any]:
    """Bytes and collectives of one optimizer step on this rank, as torch's profiler saw the allocator and the backend."""
    run, parallel = config.run, config.parallel
    layout = Layout(parallel.dp_replicate, parallel.dp_shard, parallel.ep)
    autocast = torch.bfloat16 if run.precision == "bf16" else None
    torch.manual_seed(3)
    if layout.world == 1:
        model = GPT(config.model)
    else:
        model = build_sharded(config.model, make_meshes(layout, "cpu", 60), torch.device("cpu"), autocast)
    tolerate_nan(model)
    model.set_activation_checkpointing(run.activation_checkpointing)
    optimizer = make_optimizer(model, config.optim)
    tokens = torch.randint(config.model.vocab_size, (run.batch, run.seq_len))
    documents = (torch.arange(run.seq_len) >= 20).long().expand_as(tokens)
    batches = [
        Batch(tokens[n : n + run.microbatch], tokens[n : n + run.microbatch], documents[n : n + run.microbatch], (0,))
        for n in range(rank * run.microbatch, run.batch, layout.world * run.microbatch)
    ]
    world = World(rank, layout.world, rank)
    step = lambda: train_step(model, optimizer, batches, clip=1.0, autocast=autocast, world=world)  # noqa: E731
    step()
    held = {
        "parameters": sum(local(tensor).nbytes for tensor in [*model.parameters(), *model.buffers()]),
        "optimizer": sum(local(value).nbytes for state in optimizer.state.values() for value in state.values()),
    }
    # Buffers of a collective wait for the backend's threads: on a busy machine a step may hold more of them than it needs.
    held["peak"] = held["parameters"] + held["optimizer"] + min(highest(watched(step)[0]) for _ in range(3))
    model.register_forward_pre_hook(lambda *_: mark("before"), prepend=True)
    model.register_forward_hook(lambda *_: mark("between"))
    microbatches, sent = watched(lambda: accumulate(model, batches, 1, autocast=autocast, ranks=world.size))
    gradients = [parameter.grad for parameter in model.parameters()]
    _, sent_balancing = watched(lambda: balance_step(model))
    held["gradients"] = sum(local(gradient).nbytes for gradient in gradients if gradient is not None)
    # Between forward and backward, weights that are sharded but in no block (here one table and one norm) stay gathered.
    gathered = 0 if layout.world == 1 else (config.model.vocab_size + 1) * config.model.d_model * (2 if autocast else 4)
    before, between = ([n for n, (name, _) in enumerate(microbatches) if name == what] for what in ("before", "between"))
    grown = [total(microbatches[begin:end]) for begin, end in zip(before, between, strict=True)]
    held["activations"] = min(grown) - gathered
    return {"held": held, "sent": sent, "balancing": sent_balancing}


def mark(name: str) -> None:
    with record_function(name):
        pass


def watched(function: Callable[[], Any]) -> tuple[list[tuple[str, int]], list[tuple[str, list[Any], list[str]]]]:
    """(allocations and marks in order, collectives with the shapes and dtypes of what they were given)."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, record_shapes=True) as profiled:
        kept = function()
    del kept
    events = sorted(profiled.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    memory = [(event.name(), event.nbytes() if event.name() == "[memory]" else 0) for event in events]
    memory = [event for event in memory if event[0] in ("[memory]", "before", "between")]
    names = ("c10d::_allgather_base_", "c10d::_reduce_scatter_base_", "c10d::alltoall_base_", "gloo:all_reduce")
    return memory, [(event.name(), event.shapes(), event.dtypes()) for event in events if event.name() in names]


def total(memory: list[tuple[str, int]]) -> int:
    return sum(size for _, size in memory)


def highest(memory: list[tuple[str, int]]) -> int:
    alive = most = 0
    for _, size in memory:
        alive += size
        most = max(most, alive)
    return most


def bytes_sent(collectives: list[tuple[str, list[Any], list[str]]], layout: Layout) -> dict[str, tuple[int, float]]:
    """{operation: (calls, bytes that leave the rank)} of what the profiler saw."""
    found: dict[str, list[float]] = {}

    def add(name: str, size: float) -> None:
        found.setdefault(name, []).append(size)

    for name, shapes, dtypes in collectives:
        first = torch.Size(shapes[0]).numel() * ITEM_BYTES[dtypes[0]]
        if name == "gloo:all_reduce":
            add("all_reduce", first)
            continue
        second = torch.Size(shapes[1]).numel() * ITEM_BYTES[dtypes[1]]
        if name == "c10d::_allgather_base_":
            add("all_gather", first - second)  # (out, in)
        elif name == "c10d::_reduce_scatter_base_":
            add("reduce_scatter", second - first)  # (out, in)
        else:
            kind = "counts" if dtypes[1] == "long int" else "rows"
            add(kind, second * (layout.ep - 1) / layout.ep)
    return {name: (len(sizes), sum(sizes)) for name, sizes in found.items()}


def described(config: Config) -> Description:
    return describe(config, config.parallel.dp_replicate * config.parallel.dp_shard)


REAL = [
    (Layout(1, 1, 1), "none", "fp32"),
    (Layout(1, 4, 2), "none", "fp32"),
    (Layout(1, 4, 2), "full", "fp32"),
    (Layout(1, 4, 2), "selective", "bf16"),
    (Layout(2, 2, 1), "none", "fp32"),
    (Layout(2, 2, 2), "none", "fp32"),
]


@pytest.mark.parametrize(("layout", "mode", "precision"), REAL, ids=str)
def test_memory_and_traffic_of_a_real_step(ranks: Ranks, layout: Layout, mode: str, precision: str) -> None:
    config = small(layout, mode, precision)
    found = ranks.run(layout.world, real_step, config) if layout.world > 1 else [real_step(0, None, config)]
    description = described(config)
    for rank in found:
        for what in ("parameters", "gradients", "optimizer"):
            assert description.held[what] == rank["held"][what]
    mean = {what: sum(rank["held"][what] for rank in found) / layout.world for what in found[0]["held"]}
    assert description.held["activations"] == pytest.approx(mean["activations"], rel=0.05)
    # gloo scatters a sum from a copy of the whole of it, which NCCL does not need.
    assert sum(description.peak.values()) == pytest.approx(mean["peak"], rel=0.1)

    expected: dict[str, tuple[int, float]] = {}
    sent = [bytes_sent(rank["sent"], layout) for rank in found]
    for name, (calls, _) in sent[0].items():
        expected[name] = calls, sum(one[name][1] for one in sent) / layout.world
    calls, payload = expected.pop("all_reduce", (0, 0))
    if layout.dp_replicate > 1:
        # gloo's reduce-scatter all-reduces (of what it is given, a rank keeps one part and sends the others); the rest is ours.
        inside = [(name, shapes, kinds) for name, shapes, kinds in found[0]["sent"] if name == "c10d::_reduce_scatter_base_"]
        payload -= sum(torch.Size(shapes[1]).numel() * ITEM_BYTES[kinds[1]] for _, shapes, kinds in inside)
        share = (layout.dp_replicate - 1) / layout.dp_replicate
        expected["all_reduce"] = calls - len(inside), 2 * share * payload
    measured = {name: (0, 0.0) for name in expected}
    for title, (calls, size) in description.traffic.items():
        if title != "all-reduce, balancing":
            name = (
                title.rpartition(", ")[2].split()[0]
                if title.startswith("all-to-all")
                else title.split(",")[0].replace("-", "_")
            )
            before = measured.get(name, (0, 0.0))
            measured[name] = before[0] + calls, before[1] + size
    assert measured == {name: (calls, pytest.approx(size, rel=1e-6)) for name, (calls, size) in expected.items()}

    if layout.world > 1:
        calls, payload = bytes_sent(found[0]["balancing"], layout)["all_reduce"]
        assert description.traffic["all-reduce, balancing"] == (calls, round(2 * payload * (1 - 1 / layout.world)))


def test_a_deep_model_follows_from_shallow_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    config = small(Layout(1, 4, 2), num_layers=9)
    layout = Layout(1, 4, 2)
    followed = describe_step.rehearse(config, layout, None)
    monkeypatch.setattr(describe_step, "ALONE", 100)
    rehearsed = describe_step.rehearse(config, layout, None)

    def of(numbers: dict[tuple[str, ...], float], *kinds: str) -> dict[tuple[str, ...], float]:
        return {key: number for key, number in numbers.items() if key[0] in kinds}

    exact = ("parameters", "gradients", "optimizer", "saved", "balancers", "calls", "bytes")
    assert of(followed, *exact) == of(rehearsed, *exact)
    for stretch, peak in describe_step.peaks(followed).items():
        assert sum(peak.values()) == pytest.approx(sum(describe_step.peaks(rehearsed)[stretch].values()), rel=0.02)


@pytest.mark.parametrize("changes", [{}, {"tie_embeddings": False, "post_norm": True}, {"num_dense_layers": 0}], ids=str)
def test_size_is_that_of_the_model(changes: dict[str, Any]) -> None:
    model = small(Layout(), expert_compute="loop", **changes).model
    size, count, length = measure_size(model, 64), model.num_parameters(), 32
    assert (sum(size.total.values()), sum(size.active.values())) == count

    tokens = torch.randint(model.vocab_size, (2, length))
    # Which the counter does not know.
    in_place = {torch.ops.aten.addmm_: lambda _, left, right, **__: 2 * left[0] * left[1] * right[1]}
    with FlopCounterMode(display=False, custom_mapping=in_place) as counter:
        GPT(model)(tokens, tokens).loss.backward()
    done = counter.get_flop_counts()["Global"]
    weights = sum(flops for operator, flops in done.items() if "attention" not in str(operator))
    assert weights == size.weight_flops * tokens.numel()
    attention = measure_size(model, length).attention_flops
    assert attention == 6 * model.num_layers * model.num_heads * model.head_width * length


def test_impossible_layouts_and_batches_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"ep = 3 does not divide model.num_experts = 8. Layouts that would do: dp_rep"):
        describe(small(Layout(1, 3, 3)))
    with pytest.raises(
        ConfigError, match=r"run.batch = 64: 3 ranks with microbatches of run.microbatch = 8 need a multiple of 24"
    ):
        describe(small(Layout(1, 3, 1)))


def test_balancers_are_asked_themselves() -> None:
    """Rounds and bytes of balancing follow from the balancers' own generators: one for what sums counts alone, two for eqb."""
    calls = {}
    for balancers in ("loss_free", "eqb+lei"):
        calls[balancers] = described(small(Layout(1, 2, 1), balancers=balancers)).traffic["all-reduce, balancing"]
    layers, experts = 2, 8
    assert calls["loss_free"] == (1, pytest.approx(3 * layers * experts * 8, rel=0.5))  # a few counts for each expert
    # Two halves of the sixteen bits, 256 bins of int64 each; over two ranks, a sum sends as many bytes as it has.
    assert calls["eqb+lei"] == (2, pytest.approx(layers * experts * 2 * 256 * 8, rel=0.05))


def test_command_shows_a_table_and_the_same_as_json(mini: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["describe", mini, "world=4", "run.batch=8", "parallel.ep=2"]
    assert cli.main(command) == 0
    table = capsys.readouterr().out
    for words in (
        "4 ranks: dp_replicate=1 dp_shard=4 ep=2",
        "2 of 4 experts on each rank",
        "memory of a rank, GiB",
        "all-to-all",
    ):
        assert words in table
    assert cli.main([*command, "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["layout"]["expert_dp"] == 2
    assert values["memory_per_rank"]["peak"] == sum(values["memory_per_rank"]["at_peak"].values())
    assert f"{values['parameters']['total'] / 1e3:.2f}k" in table


def test_command_refuses_in_one_line(mini: str, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, message in (
        (["world=four"], "override 'world=four': give a number of ranks"),
        (["world=4", "parallel.ep=3"], "ep = 3 does not divide"),
        (["world=3"], "run.batch = 4: 3 ranks"),
        (["model.top_q=3"], "unknown key 'model.top_q'"),
    ):
        assert cli.main(["describe", mini, *arguments]) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1
