"""SGLang's communicator for small sums between the cards -> `ops.all_reduce`, and its gathers of few rows behind it.

`dispatch_custom_allreduce(group, device)` gives each group the class of an object that its coordinator asks before
every sum: `should_custom_ar(x)`, then `custom_all_reduce(x)`, else NCCL. Of the tensor-parallel group that object is
ours where its cards can sum by one of our ways, which a probe finds out at the start; what it does not take goes to the
object that SGLang would have had, and to what comes behind that. Other groups (context, data and expert parallelism)
keep theirs. With --disable-custom-all-reduce, and so with deterministic inference, SGLang asks for no such object.
DSV4_SM120_SET=all_reduce=host or peer: only that way is tried. With host, and where the probe finds that peers fail,
SGLang's object sums nothing either, whether or not ours does: its kernels go by peers. So do those of other groups of
these cards. Where peers were not tried, the choice is SGLang's.

A call is taken by its shape alone, up to MAX_ROWS rows; a server whose decode or verify steps can have more gets none
of it, so that a row's bits never depend on the rows beside it. A reproducible server's calls are taken whatever their
rows, in pieces of MAX_ROWS.

No release asks that object for a gather. The logits' is `GroupCoordinator.all_gather` of the tensor-parallel group: a
call of NCCL, which lays the ranks' tensors one behind the other, and from two rows on a copy that lays them side by
side. Where the group's sums are ours, so is the gather of up to GATHERED_ROWS rows in one launch; what it moves is the
same whoever moves it, so nothing hangs on the border. Behind SGLang's own gather by multicast (0.5.15 and later, NVLink
with NVSwitch), and with --enable-symm-mem, nobody asks ours.

The probe is asked in front of NCCL's start where that has ours (fixes/nccl_start.py), for NCCL waits for ever by peers
that move nothing; else when the object is made.

Where the compressors' products are dealt to the cards (bf16_linear_dealt.py), they have a group of their own, made and
closed with that of the sums, by the way that the probe found.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from contextlib import contextmanager
from importlib.util import find_spec
from typing import NamedTuple

import torch

from deepseek_v4_sm120 import patching
from deepseek_v4_sm120.ops import all_reduce as op
from deepseek_v4_sm120.ops import all_reduce_probe, all_reduce_probe_process
from deepseek_v4_sm120.ops.all_reduce_sizes import DEALT_ROWS, ONE_ORDER_RANKS
from deepseek_v4_sm120.patching import lifetime, report
from deepseek_v4_sm120.settings import settings
from deepseek_v4_sm120.sglang_patches import all_reduce_ahead, device_gate, models_served, several_hosts, shadow
from deepseek_v4_sm120.sglang_patches.all_reduce_ahead import PATCH
from deepseek_v4_sm120.sglang_patches.names import CONTEXT, PARALLEL_STATE, SERVER_ARGS
from deepseek_v4_sm120.specs import bounds

GATHER = "all_gather"  # in shadow mode, which has a line for it
DEALT = "dealt_products"
TAKE_AWAY = "what it says, where that is one's own choice"
_without_peers: set[int] = set()  # ranks between which no object of SGLang's may sum
_found_ahead: dict = {}  # a group -> what its ranks have found out in front of NCCL's start


class Place(NamedTuple):
    """What a rank tells the others before they try anything."""

    is_served: bool
    host: str | None  # where processes can see each other
    most_rows: int  # of a decode or verify step
    transport: str | None = None  # the one to try; rank 0's counts
    deals: bool = False  # the compressors' products


class Found(NamedTuple):
    """What a group's ranks have found out together. verdict: the probe's; None: it was not asked, by `why`, or as a
    card is not served."""

    places: list[Place]
    verdict: all_reduce_probe.Verdict | None = None
    why: str | None = None


def find_ahead(group, device) -> all_reduce_probe.Verdict | None:
    """In front of NCCL's start of a group, on all of its ranks: what the probe says of the cards of our model's
    tensor-parallel group, which is asked here once; None where there will be no probe, and for any other group."""
    engine = patching.active_engine()
    is_in_place = engine is not None and PATCH in engine.in_place()
    if not is_in_place or not all_reduce_ahead.will_probe() or not _is_first():
        return None
    if torch.distributed.get_world_size(group) not in op.RANKS:
        return None
    _found_ahead[group] = found = _find(group, device)
    return found.verdict


def replace_dispatch(original: Callable) -> Callable:
    """For dispatch_custom_allreduce(group, device) -> the class of the group's communicator."""

    @functools.wraps(original)
    def dispatch_custom_allreduce(group, device):
        stock = original(group=group, device=device)
        is_first = _is_first()
        if is_first and models_served.has_several_hosts() and models_served.has_served_card():
            several_hosts.ask()
        if is_first and torch.distributed.get_world_size(group) in op.RANKS:
            return functools.partial(_communicator, stock)
        return functools.partial(_disabled, stock) if _is_without_peers(group) else stock

    return dispatch_custom_allreduce


def replace_all_gather(original: Callable) -> Callable:
    """For GroupCoordinator.all_gather(self, input_, dim=-1, output_tensor_list=None)."""

    def ours(self, input_):
        communicator = all_reduce_of(self)
        return op.all_gather(input_, communicator.sums, tag=communicator.next_tag())

    serve = shadow.shadowed(GATHER, ours, original, GATHER_COMPARISON)

    @functools.wraps(original)
    def all_gather(self, input_, dim=-1, output_tensor_list=None):
        if torch.compiler.is_compiling() or output_tensor_list is not None or not _gathers(self, input_, dim):
            return original(self, input_, dim, output_tensor_list)
        return serve(self, input_)

    return all_gather


def _gathers(coordinator, x, dim: int) -> bool:
    """By the group and the shape alone, which all ranks have."""
    communicator = all_reduce_of(coordinator)
    return (
        communicator is not None
        and dim in (-1, 1)
        and communicator.sums.gathers(x)
        and not coordinator.is_symmetric_memory_enabled()
    )


def _is_first() -> bool:
    """Whether it is the tensor-parallel group of our model that is made: the same answer on all ranks, and nobody
    else's server is touched. That group is made first, and bound when it is made."""
    return all_reduce_ahead.takes_model() and importlib.import_module(PARALLEL_STATE)._TP is None


def _is_without_peers(group) -> bool:
    """Of a group behind the tensor-parallel one, whether it is of that one's cards and those fail."""
    return bool(_without_peers) and _without_peers.issuperset(torch.distributed.get_process_group_ranks(group))


def _disabled(stock: Callable, group, device):
    theirs = stock(group=group, device=device)
    theirs.disabled = True
    return theirs


def _communicator(stock: Callable, group, device):
    """SGLang's own object, or ours around it: on all ranks alike."""
    theirs = stock(group=group, device=device)
    try:
        return _ours_or(theirs, group, device)
    finally:
        all_reduce_probe_process.end_ahead()  # where no probe asked it


def _ours_or(theirs, group, device):
    if why := all_reduce_ahead.why_not_ask():
        return _left(theirs, group, f"the sums between the cards stay SGLang's: {why}")

    found = _found_ahead.pop(group, None) or _find(group, device)
    places, verdict = found.places, found.verdict
    if not all(place.is_served for place in places):
        return theirs

    def leave_peers() -> None:
        theirs.disabled = True  # it goes by peers: what ours does not take is NCCL's
        _without_peers.update(torch.distributed.get_process_group_ranks(group))

    if places[0].transport == "host":
        leave_peers()
    if verdict is None:
        return _left(theirs, group, f"the sums between the cards stay SGLang's: {found.why}")
    if verdict.peers_fail:
        leave_peers()
    if verdict.transport is None:
        return _left(theirs, group, verdict.describe(), verdict.as_dict)

    rank, hidden, gather = torch.distributed.get_rank(group), _hidden(), functools.partial(_gathered, group)

    def make(together, **options):
        return op.AllReduce(rank, len(places), device, together, hidden=hidden, transport=verdict.transport, **options)

    made, why = op.made_together(gather, make)
    if made is None:
        return _left(theirs, group, f"{verdict.left()}: {why}")
    products, why_whole = None, "not every rank deals"
    if all(place.deals for place in places):
        of_products = functools.partial(make, max_rows=DEALT_ROWS, name=DEALT)
        products, why_whole = op.made_together(gather, of_products)
    text = f"{PATCH}: {verdict.describe()}"
    if rank == 0:
        report.info(f"deepseek_v4_sm120: {text} (probe: {verdict.seconds} s)")
    report.add_note(PATCH, lambda: text, verdict.as_dict)
    report.write()
    return Communicator(theirs, made, products, why_whole)


def _find(group, device) -> Found:
    """All ranks tell their places, and ask the probe where nothing stands against it."""
    gather, rank = functools.partial(_gathered, group), torch.distributed.get_rank(group)
    places = gather(Place(_is_served(device), lifetime.namespace(), _most_rows(), settings().transport, _deals()))
    if not all(place.is_served for place in places):
        return Found(places)
    if why := _why_not(places):
        return Found(places, why=why)
    chosen = places[0].transport
    verdict = all_reduce_probe.probe(rank, len(places), device.index, gather, hidden=_hidden(), transport=chosen)
    return Found(places, verdict)


def _gathered(group, value) -> list:
    told = [None] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(told, value, group=group)
    return told


def _hidden() -> int:
    return models_served.announced()["hidden"]


def _left(theirs, group, why: str, found: Callable[[], dict] | None = None):
    """SGLang's own object, and one line. found: what a probe did; without one `doctor` is told the line as well, which
    else would try these cards itself and say what they could do."""
    if settings().reproducible:
        theirs.disabled = True  # with --enable-deterministic-inference it would be, and NCCL adds by a tree
        if torch.distributed.get_world_size(group) > ONE_ORDER_RANKS:
            why += ". NOT REPRODUCIBLE: NCCL's order depends on the number of rows"
    if torch.distributed.get_rank(group) == 0 or models_served.has_several_hosts():  # the first one's may lack us
        report.warn(f"deepseek_v4_sm120: {PATCH}: {why}")
    report.add_note(
        PATCH, lambda: f"{PATCH}: {why}", found or (lambda: {"transport": None, "text": why, "remedy": TAKE_AWAY})
    )
    report.write()
    return theirs


def _deals() -> bool:
    engine = patching.active_engine()
    return engine is not None and DEALT in engine.in_place()


def _is_served(device) -> bool:
    """device_gate's rule alone: its `serves` is for calls, and looks at all modules when it is first asked."""
    return device_gate.serves_capability(torch.cuda.get_device_capability(device), settings().force)


def _why_not(places: list[Place]) -> str | None:
    if None in (hosts := {place.host for place in places}) or len(hosts) > 1:
        return "the ranks are on several hosts, or in containers that do not see each other's processes"
    if places[0].most_rows > op.MAX_ROWS and not settings().reproducible:
        return (
            f"a decode or verify step of this server may have {places[0].most_rows} rows, ours takes {op.MAX_ROWS}; "
            "what goes further would round otherwise: --max-running-requests"
        )
    return None


def _most_rows() -> int:
    """Of a decode or verify step: a row for each request, with speculation as many as it drafts. SGLang gives this
    model a number of requests where the user gave none."""
    context = importlib.import_module(CONTEXT) if find_spec(CONTEXT) is not None else None
    if hasattr(context, "max_speculative_num_draft_tokens"):  # 0.5.18 and later
        return context.get_schedule().max_running_requests * (context.max_speculative_num_draft_tokens() or 1)
    arguments = importlib.import_module(SERVER_ARGS).get_global_server_args()
    return arguments.max_running_requests * (arguments.max_speculative_num_draft_tokens or 1)


def all_reduce_of(coordinator) -> Communicator | None:
    """What makes a group's sums up to MAX_ROWS rows, where those are ours; None: SGLang makes them."""
    asked = getattr(coordinator, "ca_comm", None)
    return asked if isinstance(asked, Communicator) and not asked.disabled else None


class Tags:
    """The numbers of one group's calls: of a call in the graph under capture its place there; 0 outside of graphs."""

    def __init__(self):
        self._captured = 0

    def next(self) -> int:
        self._captured = self._captured + 1 if torch.cuda.is_current_stream_capturing() else 0
        return self._captured


class Communicator:
    """What a group's coordinator asks, ours around SGLang's own object `theirs`. products: the group by which dealt
    products are gathered; None, with the reason `why_whole`: none are dealt.

    SGLang's v1 gives zeros in the warm-up of a capture; ours sums there as everywhere, on all ranks, and so does NCCL.
    """

    def __init__(self, theirs, sums: op.AllReduce, products: op.AllReduce | None = None, why_whole: str | None = None):
        self.disabled = False  # SGLang may set it
        self._theirs, self.sums = theirs, sums
        self.products, self.why_whole = products, why_whole
        self._tags, self.product_tags = Tags(), Tags()
        self._is_aside, self._is_in_capture = False, False
        self._takes_all_rows = settings().reproducible
        self._sum = shadow.shadowed(PATCH, self._ours, self._stock, COMPARISON)

    def __getattr__(self, name: str):
        return getattr(self._theirs, name)

    def should_custom_ar(self, inp: torch.Tensor) -> bool:
        return self._takes(inp) or (not self._theirs.disabled and self._theirs.should_custom_ar(inp))

    def custom_all_reduce(self, input: torch.Tensor) -> torch.Tensor | None:
        if not self._takes(input):
            return self._theirs.custom_all_reduce(input)
        is_warm_up = self._is_in_capture and not torch.cuda.is_current_stream_capturing()
        return (self._ours if is_warm_up else self._sum)(input)  # theirs has no sum to compare with there

    def next_tag(self) -> int:
        """Of a sum that is launched now."""
        return self._tags.next()

    @contextmanager
    def capture(self):
        self._is_in_capture = True
        try:
            with self._theirs.capture():
                yield
        finally:
            self._is_in_capture = False

    def close(self) -> None:
        self._theirs.close()
        if self.products is not None:
            self.products.close()
        self.sums.close()

    def _takes(self, x: torch.Tensor) -> bool:
        return not self._is_aside and self.sums.takes(x[: op.MAX_ROWS] if self._in_pieces(x) else x)

    def _in_pieces(self, x: torch.Tensor) -> bool:
        return self._takes_all_rows and x.ndim == 2 and x.shape[0] > op.MAX_ROWS

    def may_be_nccls(self, x: torch.Tensor) -> bool:
        """Whether NCCL may sum in place of ours: prompts' rows, over cards whose terms have one order."""
        return self._in_pieces(x) and self.sums.ranks <= ONE_ORDER_RANKS

    def _ours(self, x: torch.Tensor) -> torch.Tensor:
        if not self._in_pieces(x):
            return op.all_reduce(x, self.sums, tag=self.next_tag())
        out = torch.empty_like(x)
        for terms, sums in zip(x.split(op.MAX_ROWS), out.split(op.MAX_ROWS), strict=True):
            op.all_reduce(terms, self.sums, out=sums, tag=self.next_tag())
        return out

    def _stock(self, x: torch.Tensor) -> torch.Tensor:
        """SGLang's own sum, by whatever it would have taken."""
        groups = (reference() for reference in importlib.import_module(PARALLEL_STATE)._groups.values())
        coordinator = next(group for group in groups if group is not None and group.ca_comm is self)
        self._is_aside = True
        try:
            return coordinator.all_reduce(x.clone())  # NCCL's is in place
        finally:
            self._is_aside = False


GATHER_COMPARISON = shadow.Comparison(
    tensors=lambda ours, theirs, coordinator, x: [(ours, theirs)],
    identity=lambda coordinator, x: (GATHER, x.shape[1]),
    shape=lambda coordinator, x: {"rows": x.shape[0]},
    relative_l2=bounds.ALL_GATHER,
)
COMPARISON = shadow.Comparison(
    tensors=lambda ours, theirs, x: [(ours, theirs)],
    identity=lambda x: PATCH,
    shape=lambda x: {"rows": x.shape[0]},
    relative_l2=bounds.ALL_REDUCE.shadow,
)
