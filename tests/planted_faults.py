"""Routers with one fault each, for every row of the conformance suite. Importable by name: ranks load it, too."""

import dataclasses
import math

import torch
from torch import nn

from evenload import ExactQuantile, GShardLoss, HistogramQuantile, Router
from evenload.balancers.recompute import autograd_is_idle
from evenload.kernels import combine_weights
from evenload.kernels import top_k as stable_top_k
from evenload.models import MoELayer
from evenload.models.conformance import LayerAdapter

DOCUMENTS = {"name": "gshard", "scope": "sequence"}


class Sound(LayerAdapter):
    """No fault; every row applies to it."""

    def __init__(self, balancers=("eqb", DOCUMENTS), **options):
        super().__init__(list(balancers), **options)


# Row 1


class CountsPadding(ExactQuantile):
    def observe(self, routing):
        super().observe(dataclasses.replace(routing, mask=None))


class Padding(Sound):
    def __init__(self):
        super().__init__([CountsPadding, DOCUMENTS])


# Row 2


class InvertedMask(Router):
    def forward(self, x, *, mask=None, **context):
        return super().forward(x, mask=None if mask is None else ~mask, **context)


class Polarity(Sound):
    router_class = InvertedMask


class AnyMask(Router):
    def forward(self, x, *, mask=None, **context):
        return super().forward(x, mask=None if mask is None else mask.bool(), **context)


class AnyMaskWillDo(Sound):
    router_class = AnyMask


# Row 3


class ProbabilitiesAsLogits(Router):
    def forward(self, x, **context):
        routing = super().forward(x, **context)
        return dataclasses.replace(routing, logits=routing.logits.softmax(-1))


class NotRaw(Sound):
    router_class = ProbabilitiesAsLogits


class SoftmaxOfProbabilities(GShardLoss):
    def inject(self, routing, documents):
        return super().inject(dataclasses.replace(routing, scores=routing.scores.softmax(-1)), documents)


class DoubleSoftmax(Sound):
    def __init__(self):
        super().__init__(["eqb", SoftmaxOfProbabilities(scope="sequence")])


# Row 4


class CountsInEval(Router):
    def forward(self, x, **context):
        routing = super().forward(x, **context)
        if not self.training:
            self.ledger.counts += routing.counts
        return routing


class EvalLeak(Sound):
    router_class = CountsInEval


# Row 5


class CountsTwice(Router):
    def forward(self, x, **context):
        routing = super().forward(x, **context)
        if self.training:
            again = torch.logical_not(torch.as_tensor(autograd_is_idle(routing.scores)))
            self.ledger.counts += routing.counts * again
        return routing


class Recompute(Sound):
    router_class = CountsTwice


# Row 6


class AveragesShards(Sound):
    """Claims the step, averages over its microbatches."""

    def __init__(self):
        super().__init__(["qb", DOCUMENTS])
        self.scope = "step"


class StrengthOfMicrobatches(Sound):
    def backward(self, model, loss, share=1.0):
        (loss * share).backward()  # injected gradients are not told of the share


# Row 7


class FollowsTheModel(ExactQuantile):
    def _apply(self, fn, recurse=True):
        super()._apply(fn, recurse)
        self._buffers["bias"] = fn(self._buffers["bias"])
        return self


class Narrow(Sound):
    def __init__(self):
        super().__init__([FollowsTheModel, DOCUMENTS])


# Row 8


class NewTensor(ExactQuantile):
    def update(self):
        yield from super().update()
        self._buffers["bias"] = self.bias.clone()


class Rebinding(Sound):
    def __init__(self):
        super().__init__([NewTensor, DOCUMENTS])


class Unsaved(ExactQuantile):
    def build(self):
        super().build()
        self.register_buffer("bias", self.bias, persistent=False)


class NotSaved(Sound):
    def __init__(self):
        super().__init__([Unsaved, DOCUMENTS])


class LoadsAnything(Router):
    def load_state_dict(self, state_dict, strict=True, assign=False):
        return super().load_state_dict(state_dict, strict=False, assign=assign)


class MissingStateLoads(Sound):
    router_class = LoadsAnything


# Row 9


class InitialisedOnce(ExactQuantile):
    def reset_parameters(self):
        self.reset_statistics()


class MetaInit(Sound):
    def __init__(self):
        super().__init__([InitialisedOnce, DOCUMENTS])


# Row 10


class RepeatsIds(Router):
    def forward(self, x, **context):
        routing = super().forward(x, **context)
        bad = x.isnan().any(dim=-1, keepdim=True)
        return dataclasses.replace(routing, indices=routing.indices.masked_fill(bad, 0))


class NanRows(Sound):
    router_class = RepeatsIds

    def __init__(self):
        super().__init__(nan="route")


class NanUncounted(Sound):
    def __init__(self):
        super().__init__(nan="route")

    def step(self, model, group=None):
        return dataclasses.replace(super().step(model, group), nan_rows=0)


# Row 11


class HighestFirst(ExactQuantile):
    def selection_bias(self, selection, mask):
        return self.bias + 1.2e-7 * torch.arange(self.num_experts)


class Ties(Sound):
    def __init__(self):
        super().__init__([HighestFirst, DOCUMENTS])


# Row 12


class DetachedWhenEmpty(Router):
    def forward(self, x, **context):
        routing = super().forward(x, **context)
        return routing if x.shape[0] else dataclasses.replace(routing, weights=routing.weights.detach())


class EmptyRank(Sound):
    router_class = DetachedWhenEmpty


# Row 13


class EmptyExpert(Sound):
    def layer(self, num_experts, top_k, *, capacity_factor=None):
        layer = super().layer(num_experts, top_k, capacity_factor=capacity_factor)
        layer.experts.w_down.register_hook(lambda grad: grad.masked_fill(grad == 0, math.nan))
        return layer


# Row 14


class AnyCapacity(Sound):
    def layer(self, num_experts, top_k, *, capacity_factor=None):
        legal = isinstance(capacity_factor, float) and capacity_factor > 0
        return super().layer(num_experts, top_k, capacity_factor=capacity_factor if legal else None)


class NoCapacity(Sound):
    def layer(self, num_experts, top_k, *, capacity_factor=None):
        layer = super().layer(num_experts, top_k, capacity_factor=capacity_factor)
        return MoELayer(layer.router, layer.experts)


# Row 15


class Bincount(Router):
    def forward(self, x, **context):
        routing = super().forward(x, **context)
        if routing.mask is not None:
            return routing
        counts = torch.bincount(routing.indices.flatten(), minlength=self.num_experts)
        return dataclasses.replace(routing, counts=counts)


class Syncs(Sound):
    router_class = Bincount


class Branches(Router):
    def forward(self, x, **context):
        routing = super().forward(x, **context)
        return routing if routing.counts.max() > 0 else dataclasses.replace(routing)


class GraphBreak(Sound):
    router_class = Branches


# Row 16


class OnePack(Router):
    def forward(self, x, *, document_ids=None, **context):
        return super().forward(x, **context, document_ids=torch.zeros(x.shape[:-1]))


class Packing(Sound):
    router_class = OnePack


# Row 17


class ZeroedGroups(Router):
    def forward(self, x, **context):
        routing = super().forward(x, **context)
        if routing.allowed is None:
            return routing
        biased = (routing.selection + self.biasing.bias).masked_fill(~routing.allowed, 0.0)
        indices, _ = stable_top_k(biased, self.top_k)
        weights = combine_weights(routing.scores, indices, routing.mask, False, 1.0)
        return dataclasses.replace(routing, indices=indices, weights=weights)


class Groups(Sound):
    router_class = ZeroedGroups


# Row 18


class Pooling(Sound):
    def step(self, model, group=None):
        report = super().step(model, group)
        if len(report.counts) == 1:
            return report
        share = torch.stack(report.counts).double().sum(dim=0) / sum(int(counts.sum()) for counts in report.counts)
        pooled = 0.01 * share.numel() * share.square().sum()
        return dataclasses.replace(report, losses={"gshard": pooled})


# Row 19


class RankLocalCounts(Sound):
    def step(self, model, group=None):
        routers = [module for module in model.modules() if isinstance(module, Router)]
        counts = [router.counts.clone() for router in routers]
        return dataclasses.replace(super().step(model, group), counts=counts)


class KeyPerLayer(Sound):
    def step(self, model, group=None):
        report = super().step(model, group)
        keys = [f"layer {layer} {key}" for layer in range(len(report.counts)) for key in report.keys]
        return dataclasses.replace(report, keys=tuple(keys))


class RoundedCounts(Sound):
    def step(self, model, group=None):
        report = super().step(model, group)
        return dataclasses.replace(report, counts=[counts.bfloat16() for counts in report.counts])


# Row 20


class SaysNothing(Router):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.never_balanced.silent = True


class SilentNoOp(Sound):
    router_class = SaysNothing


# Row 21


class NotDividedByK(GShardLoss):
    def inject(self, routing, documents):
        injection = super().inject(routing, documents)
        return dataclasses.replace(injection, value=injection.value * self.top_k)


class ScaleWords(Sound):
    def __init__(self):
        super().__init__(["eqb", NotDividedByK(scope="sequence")])


# Row 22

KEPT: list[nn.Module] = []
SHARED = torch.zeros(())


class KeptAlive(Router):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        KEPT.append(self)


class HiddenGlobals(Sound):
    router_class = KeptAlive


class SharedLoss(GShardLoss):
    """Adds what the latest router, whichever it was, has left behind."""

    def build(self):
        super().build()
        SHARED.zero_()

    def inject(self, routing, documents):
        injection = super().inject(routing, documents)
        value = injection.value + SHARED
        SHARED.copy_(injection.value)
        return dataclasses.replace(injection, value=value)


class SharedLosses(Sound):
    def __init__(self):
        super().__init__(["eqb", SharedLoss(scope="sequence")])


# Row 23


class PowersOfTwo(Router):
    def forward(self, x, **context):
        if self.num_experts & (self.num_experts - 1):
            raise AssertionError(f"{self.num_experts} experts")
        return super().forward(x, **context)


class OddSizes(Sound):
    router_class = PowersOfTwo


# Row 24


class Subtracted(ExactQuantile):
    def selection_bias(self, selection, mask):
        return -self.bias


class Sign(Sound):
    def __init__(self):
        super().__init__([Subtracted, DOCUMENTS])


class WrongWay(ExactQuantile):
    def update(self):
        yield from super().update()
        self.bias.neg_()


class WrongUpdate(Sound):
    def __init__(self):
        super().__init__([WrongWay, DOCUMENTS])


class AlmostTheQuantile(ExactQuantile):
    def update(self):
        yield from super().update()
        self.bias.mul_(0.99)


class Inexact(Sound):
    def __init__(self):
        super().__init__([AlmostTheQuantile, DOCUMENTS])


# Row 25


class TakesAnyScore(HistogramQuantile):
    def build(self):
        score, self.score = self.score, "sigmoid"
        super().build()
        self.score = score


class ValueRange(Sound):
    def __init__(self):
        super().__init__([TakesAnyScore, DOCUMENTS])


# Row 26


class WholeWorld(Sound):
    def step(self, model, group=None):
        return super().step(model, None)


# One fault per row, which must fail that row and no other.
PLANTED = {
    1: Padding,
    2: Polarity,
    3: NotRaw,
    4: EvalLeak,
    5: Recompute,
    6: AveragesShards,
    7: Narrow,
    8: Rebinding,
    9: MetaInit,
    10: NanRows,
    11: Ties,
    12: EmptyRank,
    13: EmptyExpert,
    14: AnyCapacity,
    15: Syncs,
    16: Packing,
    17: Groups,
    18: Pooling,
    19: RankLocalCounts,
    20: SilentNoOp,
    21: ScaleWords,
    22: HiddenGlobals,
    23: OddSizes,
    24: Sign,
    25: ValueRange,
    26: WholeWorld,
}
# Other ways to fail the same rows.
FURTHER = [
    (2, AnyMaskWillDo),
    (3, DoubleSoftmax),
    (6, StrengthOfMicrobatches),
    (8, NotSaved),
    (8, MissingStateLoads),
    (10, NanUncounted),
    (14, NoCapacity),
    (15, GraphBreak),
    (19, KeyPerLayer),
    (19, RoundedCounts),
    (22, SharedLosses),
    (24, WrongUpdate),
    (24, Inexact),
]
