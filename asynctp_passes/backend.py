"""The torch.compile backend, and the Inductor passes that it runs.

torch.compile(model, backend="asynctp")                                          one line
torch._inductor.config.post_grad_custom_post_pass = AsyncTPPass(Config(...))     for a compiler of one's own
torch._inductor.config.joint_custom_post_pass = RematerializePass(Config(...))   with it: it sees the program's order
torch._inductor.config.custom_partitioner_fn = RematerializePartitioner(Config(...))   with both: gathers made again
"""

from __future__ import annotations

import base64
import collections
import contextlib
import copy
import logging
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from asynctp_passes import ops, pipeline
from asynctp_passes.config import Config, ConfigError, did_you_mean
from asynctp_passes.errors import AsyncTPError, DisagreementError, GroupError, StrictError
from asynctp_passes.ir import registry
from asynctp_passes.ops import call_sites
from asynctp_passes.ranks import leaving
from asynctp_passes.ranks.accord import ask
from asynctp_passes.reporting import files
from asynctp_passes.reporting.across import cut_chains, forget, remembering
from asynctp_passes.reporting.internal import FORESEEN, contained, sources_digest, tell
from asynctp_passes.reporting.picture import Summary, picture
from asynctp_passes.reporting.report import Report
from asynctp_passes.reporting.strictness import judge_uncompiled, raise_if_strict_across
from asynctp_passes.reporting.torch_notes import hidden_calls, with_own_breaks
from asynctp_passes.torch_private import (
    dynamo,
    inductor_compile,
    inductor_options,
    partitioner,
    process_groups,
    uncompiled,
)

if TYPE_CHECKING:
    from asynctp_passes.reporting import graph_page

log = logging.getLogger(__name__)

_PASS_OPTION = "post_grad_custom_post_pass"
_JOINT_PASS_OPTION = "joint_custom_post_pass"
_PARTITIONER_OPTION = "custom_partitioner_fn"
_PASSES_OPTION = "use_post_grad_passes"
_KEPT_REPORTS = 4096
_lock = threading.Lock()
_reports: collections.deque[Report] = collections.deque(maxlen=_KEPT_REPORTS)


def reports() -> tuple[Report, ...]:
    """The reports of this process's compiles, newest last: one per graph, so forward and backward apart.

    Graphs without any collective give none. Where torch broke one at a collective or at a matmul, which then is in no
    graph, that is logged. A graph that Inductor took from its cache was not compiled, so the pass did not run: its
    report is the one of the compile that filled the cache, with `from_cache=True`. Holds the newest 4096.
    """
    _publish_cached(None)
    if hidden := hidden_calls():
        log.warning("asynctp: %s", hidden)
    with _lock:
        return tuple(_reports)


def clear_reports() -> None:
    """Forget all reports, and begin the picture of the process anew.

    Its graph breaks, and its calls of fused ops, are counted since the process began: graphs that are compiled already
    still have them. Take the difference of two summaries.
    """
    _publish_cached(None)
    with _lock:
        _reports.clear()
    picture.forget()
    forget()


def summary() -> Summary:
    """The picture of this process: chains by module, graphs, graph breaks and caches. `print` shows it."""
    _publish_cached(None)
    return picture.summary()


def require(fused: int = 0, missed: int = 0) -> None:
    """Require that asynctp has done its work; to be called after the first step, or in a test.

    Args:
        fused: Chains of this process that must be fused at least, counted as `summary` does.
        missed: Chains that may be missed at most. A function that torch fails to compile counts as one.

    Raises:
        ExpectError: Fewer are fused, more are missed, or asynctp itself failed; the message is the picture.
        ConfigError: One of the numbers is not an integer >= 0.
    """
    for name, value in (("fused", fused), ("missed", missed)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise ConfigError(f"asynctp: {name}={value!r} is not valid; it must be an integer >= 0")
    summary().require(fused, missed)


class _OwnPass:
    """A pass with a configuration. Picklable; holds no process group."""

    def __init__(self, config: Config | None = None) -> None:
        self.config = Config.given(config)

    def uuid(self) -> Any:
        """A pass's key in Inductor's caches: both packages' sources, torch, configuration, registered ops, what the
        fused ops run, and this process's groups, which graphs have by name only, with their sizes and mesh dimensions.

        None, which turns caching off, where that cannot be found out, and where a graph is compiled without caches.
        """
        if not inductor_compile.uses_caches():
            return None
        try:
            return self._key()
        except FORESEEN:
            raise
        except Exception as error:
            tell(error, "make the key of Inductor's caches", "The graph is compiled, and not cached")
            return None

    @contextlib.contextmanager
    def _publishing(self) -> Iterator[Callable[[Report | None], None]]:
        """Run a pass that reports on failures only: publish what it hands over, or the report of a `StrictError`."""

        def publish(report: Report | None) -> None:
            if report is not None:
                _publish(report, self.config)

        _require_groups(self.config)
        try:
            yield publish
        except StrictError as error:
            publish(error.report)
            raise

    def _key(self) -> bytes:
        runs = f"{ops.implementation('cpu')} {ops.finds_kernels()}"  # Inductor's own key has triton's version
        mesh = process_groups.mesh_dimensions()
        groups = ",".join(f"{name}:{process_groups.size_of_group(name)}:{dim}" for name, dim in mesh.items())
        drawn = self.config.graph_dir or ""  # a graph that is cached is not drawn
        # all-to-alls by gather, which are told apart by the rank's number (`missed_gather`), are of CPUs
        places = (
            "" if process_groups.uses_gpus() else ",".join(str(process_groups.rank_in_group(name)) for name in mesh)
        )
        versions = (sources_digest(), str(torch.__version__), f"calls {call_sites.VERSION}")
        frozen = ",".join(map(str, sorted(partitioner.frozen())))  # which a graph without gradients does not say
        parts = (*versions, self.config.digest(), registry.digest(), runs, groups, places, drawn, frozen)
        return "-".join(parts).encode()


class AsyncTPPass(_OwnPass, inductor_compile.CustomGraphPass):
    """The pass, for `torch._inductor.config.post_grad_custom_post_pass`. Picklable; holds no process group.

    Args:
        config: The configuration; the environment's and the defaults when None.

    Attributes:
        forward: The report of a graph that is no backward, the first that has crossings; None before.
        names: The names of the compiled function's inputs, for pages (`Config.graph_dir`); None where they are unknown.
    """

    def __init__(self, config: Config | None = None) -> None:
        super().__init__(config)
        self.forward: Report | None = None
        self.names: graph_page.Names | None = None

    def __call__(self, graph: fx.Graph) -> Report:  # type: ignore[override]
        """Run the pass on a post-grad graph, in place, send the report to the configured sinks, and return it.

        Raises:
            StrictError, ExpectError: As `Config.strict` and `Config.expect` ask, also where asynctp itself failed and
                nothing is fused because of that. Through torch.compile they arrive as the `inner_exception` of
                Inductor's error.
            DisagreementError: A graph that Inductor took from its cache before this one does what a rank does not, or
                asynctp failed on a graph after all ranks had agreed on something.
            GroupError: `groups` names a process group that does not exist here.
        """
        _require_groups(self.config)
        cached: list[Report] = []
        with contained("publish reports of cached graphs"):
            cached = _publish_cached(self.config, named=False)
        if refused := _refused(cached, inductor_options.obeyed(self.config)):
            raise DisagreementError(f"asynctp: {_cached_in_vain(refused)}")
        before: fx.Graph | None = None
        with contained("copy the graph, to draw it"):
            before = _copy(graph) if self.config.graph_dir else None
        begun = time.perf_counter()
        try:
            report = pipeline.run(graph, self.config)
        except AsyncTPError as error:
            if error.report is not None:
                _publish(error.report, self.config, before, graph, names=self.names, raised=True)
            raise
        report = replace(report, seconds=round(time.perf_counter() - begun, 4))
        if report.phase != "backward" and (self.forward is None or not self.forward.crossings):
            self.forward = report  # before it come the branches of a torch.cond, whose border is none
        with contained("store the report with the compiled graph"):
            _send_with_cache_entry(report)
        _publish(report, self.config, before, graph, names=self.names)
        if report.phase == "backward":
            with contained("tell where nothing is fused"):
                picture.warn_of_nothing(self.config)
        return report


class RematerializePass(_OwnPass, inductor_compile.CustomGraphPass):
    """For `torch._inductor.config.joint_custom_post_pass`: it notes the order of the program's collectives.

    It also marks the gathers of `Config.rematerialize` for a `RematerializePartitioner`. Picklable; holds no process
    group.

    Args:
        config: The configuration; the environment's and the defaults when None.
    """

    def __call__(self, graph: fx.Graph) -> None:
        """Mark the gathers of a joint graph that are worth being made again in the backward.

        Raises:
            DisagreementError: asynctp failed on the graph after all ranks had agreed on something.
            StrictError: asynctp itself failed, and `Config.strict` is "all".
            GroupError: `groups` names a process group that does not exist here.
        """
        with self._publishing() as publish:
            if pipeline.communicates(graph):
                from asynctp_passes.remat.joint import run_joint

                publish(run_joint(graph, self.config))


class RematerializePartitioner(_OwnPass, partitioner.CustomPartitionerFn):
    """`Config.rematerialize`, for `torch._inductor.config.custom_partitioner_fn`, with a `RematerializePass`.

    It divides graphs as it is told to, and lets their backwards make gathers again that their forwards made. Picklable,
    if `inner` is; holds no process group.

    Args:
        config: The configuration; the environment's and the defaults when None.
        inner: The partitioner that divides graphs; Inductor's own when None.
    """

    def __init__(self, config: Config | None = None, inner: Callable[..., Any] | None = None) -> None:
        super().__init__(config)
        self.inner = inner

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle it without report sinks: Inductor pickles it for its caches' keys, besides asking for its `uuid`."""
        return type(self), (Config(**self.config.decisive()), self.inner)

    def __deepcopy__(self, memo: dict[int, Any]) -> RematerializePartitioner:
        return type(self)(self.config, copy.deepcopy(self.inner, memo))

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **options: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Divide a joint graph into forward and backward.

        Raises:
            DisagreementError: asynctp failed on the graphs after all ranks had agreed on something.
            StrictError: asynctp itself failed, and `Config.strict` is "all".
            GroupError: `groups` names a process group that does not exist here.
        """
        divide = self.inner or partitioner.default_partition
        with self._publishing() as publish:
            if not pipeline.communicates(gm.graph):
                return divide(gm, joint_inputs, **options)
            from asynctp_passes.remat.partition import run_partition

            forward, backward, report = run_partition(
                gm, lambda: divide(gm, joint_inputs, **options), options.get("num_fwd_outputs"), self.config
            )
            publish(report)
        return forward, backward

    def uuid(self) -> Any:
        """As of the passes, with that of the partitioner inside; None where that has none."""
        own = super().uuid()
        if self.inner is None:
            return own
        ids = (own, _uuid_of(self.inner))
        return ids if all(ids) else None


class _PassSequence(inductor_compile.InferenceAwareGraphPass):  # type: ignore[misc]
    """The user's own passes, then ours: some torch versions take a single pass only."""

    def __init__(self, passes: Sequence[Callable[..., None]]) -> None:
        self.passes = tuple(passes)

    def __call__(self, graph: fx.Graph, is_inference: bool = False) -> None:
        for graph_pass in self.passes:
            inductor_compile.call_graph_pass(graph_pass, graph, is_inference)

    def uuid(self) -> tuple[Any, ...] | None:
        """The passes' own identifiers; None, which turns caching off, when one has none."""
        ids = tuple(map(_uuid_of, self.passes))
        return ids if all(ids) else None


def _uuid_of(step: Callable[..., Any]) -> Any:
    return getattr(step, "uuid", lambda: None)()


def asynctp(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
) -> Callable[..., Any]:
    """The torch.compile backend: Inductor, with the asynctp pass after the user's own post-grad passes.

    Args:
        gm: The graph that dynamo captured.
        example_inputs: Its inputs.
        mode: A torch.compile mode (`"reduce-overhead"`, ...), handed on to Inductor.
        options: Fields of `Config`, and any Inductor options.

    Raises:
        GroupError: `groups` names a process group that does not exist here.
        ConfigError: An option is neither a field of Config nor an Inductor option, or has a bad value.
    """
    config, patches = split_options(options or {})
    return compile_graph(gm, example_inputs, config, {**inductor_options.of_mode(mode), **patches})


def compile_graph(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    config: Config,
    patches: dict[str, Any],
    further: dict[str, Any] | None = None,
) -> Callable[..., Any]:
    """The backend, with its options apart: `patches` are Inductor's, `further` other arguments of its `compile_fx`."""
    _require_groups(config)
    config = inductor_options.obeyed(config, patches)  # ranks ask with it, whether they compile or take from a cache
    ours = AsyncTPPass(config)
    if config.graph_dir is not None:
        with contained("name the inputs, for the graph's page"):
            from asynctp_passes.reporting import graph_page

            ours.names = graph_page.Names.of(gm)
    with contained("note which parameters are frozen"):
        partitioner.note_frozen(dynamo.frozen_parameters(gm))
    patches = with_passes(patches, ours)
    found = list[Report]()
    given: dict[int, torch.Tensor] = {}
    with contained("look at the inputs"):
        given = dynamo.given_tensors(gm)

    def accept_reports(joint: bool, again: bool) -> bool:
        cached: list[Report] = []
        with contained("read reports of cached graphs"):
            cached = _read_cached(compiling=False)
        refused = _refused(cached, config, joint=joint)
        if refused and again:
            raise DisagreementError(f"asynctp: {_cached_in_vain(refused)}")
        if refused:  # these graphs do not run, and are not reported
            log.warning("asynctp: compiles again without caches: %s", _cached_in_vain(refused))
            return False
        found.extend(cached)
        with contained("publish reports of cached graphs"):
            for report in cached:
                _publish(report, config)
        return True

    compiled = inductor_compile.compile_graph(gm, example_inputs, patches, accept_reports, further or {})
    forward = ours.forward or next((one for one in found if one.crossings), None)
    if ours.forward is None and not found:
        log.info(
            "asynctp: %s was not compiled now (Inductor's cache had it, or it has no tensor code), and no report came "
            "with it. What the cache holds was compiled with the same sources and configuration.",
            dynamo.compile_name(),
        )
    across, fused = cut_chains(given, forward, config)
    if across is not None:
        try:
            raise_if_strict_across(across, config, fused)
        except AsyncTPError:
            _publish(across, config, across=True, raised=True)
            raise
        _publish(across, config, across=True)
    with contained("tell where nothing is fused"):
        picture.warn_of_nothing(config)
    return remembering(compiled, gm, forward)


asynctp.reset = inductor_compile.reset_cudagraphs  # type: ignore[attr-defined]  # torch._dynamo.reset() calls it


def _judge_uncompiled(found: uncompiled.Uncompiled) -> None:
    """Judge a function that Dynamo fails to compile for this backend, or for Inductor with passes of asynctp's.

    Raises:
        StrictError, ExpectError: As `judge_uncompiled`.
        ConfigError: An option is neither a field of Config nor an Inductor option, or has a bad value.
    """
    if found.backend is asynctp:
        config, _ = split_options(dict(found.options))
        judge_uncompiled(found, config)
    elif found.is_inductor and (passes := own_passes(found.options)):
        judge_uncompiled(found, passes[0].config)


uncompiled.listen(_judge_uncompiled)  # torch imports this module when it looks the backend up, before it compiles


def split_options(options: dict[str, Any]) -> tuple[Config, dict[str, Any]]:
    """Our options as a Config, and Inductor's as they are; `-` in a name stands for `_`, as torch.compile allows.

    Raises:
        ConfigError: One is neither a field of Config nor an Inductor option, or has a bad value.
    """
    fields, known = set(Config.field_names()), inductor_options.names()
    options = {name.replace("-", "_"): value for name, value in options.items()}
    patches = {name: value for name, value in options.items() if name not in fields}
    for name, value in patches.items():
        if name not in known:
            raise ConfigError(
                f"asynctp: option {name!r} is not valid; it must be one of {sorted(Config.field_names())} or an "
                f"Inductor option (torch._inductor.list_options()){did_you_mean(name, {*fields, *known})}"
            )
        if (wanted := inductor_options.type_of(name)) is not None and not isinstance(value, wanted):
            raise ConfigError(
                f"asynctp: {name}={value!r} is not valid; Inductor's option is of type {wanted.__name__}, and this is "
                f"of type {type(value).__name__}"
            )
    return Config.from_options({name: value for name, value in options.items() if name in fields}), patches


def _require_groups(config: Config) -> None:
    """A group that is misspelt would be enrolled and never met; say so at once."""
    known = process_groups.names()
    unknown = [name for name in config.groups if name not in known] if config.groups != "auto" and known else []
    if unknown:
        raise GroupError(
            f"asynctp: groups has {unknown}, which is no process group here; there are {sorted(known)}. Pass the "
            "ProcessGroup or DeviceMesh itself, or its group_name"
        )


def with_passes(patches: dict[str, Any], ours: AsyncTPPass) -> dict[str, Any]:
    """Inductor's options with our passes after the user's.

    `shape_padding` is off unless they have it on: each rank would time for itself whether to pad a matmul, and ranks
    that pad differently would have different graphs.
    """
    if not runs_passes(patches):
        raise ConfigError(
            f"asynctp: {_PASSES_OPTION}=False (mode='lite' sets it) is not valid with asynctp: Inductor "
            "would not run the pass; leave it True"
        )
    passes: dict[str, Any] = {}
    added: dict[str, Callable[..., Any]] = {_PASS_OPTION: ours, _JOINT_PASS_OPTION: RematerializePass(ours.config)}
    for name, one in added.items():
        others = _passes_in(patches.get(name, inductor_options.current(name)))
        kept = [step for step in others if not isinstance(step, type(one))]
        passes[name] = _PassSequence([*kept, one]) if kept else one
    present = patches.get(_PARTITIONER_OPTION, inductor_options.current(_PARTITIONER_OPTION))
    inner = present.inner if isinstance(present, RematerializePartitioner) else present
    divider = RematerializePartitioner(ours.config, inner)
    return {"shape_padding": False, **patches, **passes, _PARTITIONER_OPTION: divider}


def runs_passes(patches: dict[str, Any]) -> bool:
    """Whether Inductor runs custom passes under these options."""
    return bool(patches.get(_PASSES_OPTION, inductor_options.current(_PASSES_OPTION)))


def own_passes(patches: Mapping[str, Any] | None = None) -> list[_OwnPass]:
    """The passes of asynctp's among Inductor's options: those of a compile, given by `patches`, else of the process."""
    names, given = (_PASS_OPTION, _JOINT_PASS_OPTION, _PARTITIONER_OPTION), patches or {}
    present = (given.get(name, inductor_options.current(name)) for name in names)
    return [step for passes in present for step in _passes_in(passes) if isinstance(step, _OwnPass)]


def _passes_in(present: Any) -> list[Any]:
    """The passes that an option of Inductor holds, one by one."""
    passes = present if isinstance(present, list | tuple) else [] if present is None else [present]
    return [step for item in passes for step in (item.passes if isinstance(item, _PassSequence) else (item,))]


# --- reports of cached graphs -----------------------------------------------------------------------------
# Inductor keeps in a cache entry what its counters gained during the compile, and adds that to the counters again when
# the entry is used (its FX graph cache and AOTAutograd's, local and remote). A report that is the name of a counter is
# therefore stored with the code that it describes, and comes back with it: no file of ours, no key, nothing stale.
_COUNTER = "asynctp_report_"
_sent: collections.Counter[str] = collections.Counter()  # by passes of this process, and still in the counters


def _send_with_cache_entry(report: Report) -> None:
    """Put the report into the cache entry that Inductor is about to make."""
    name = _COUNTER + base64.b64encode(zlib.compress(report.to_json().encode())).decode()
    with _lock:
        _sent[name] += 1
        inductor_compile.cached_counters()[name] += 1


def _publish_cached(config: Config | None, *, named: bool = True) -> list[Report]:
    """Publish the reports of `_read_cached`, and return them. config: names the sinks; None keeps the reports only."""
    replayed = _read_cached(compiling=True, named=named)
    for report in replayed:
        _publish(report, config, strayed=not named)
    return replayed


def _read_cached(*, compiling: bool, named: bool = True) -> list[Report]:
    """The reports that came with cache entries since the last call.

    Args:
        compiling: A compile may be under way whose cache entry is not made yet: leave what its pass sent.
        named: They are of the compile under way, and get its name.
    """
    texts = (zlib.decompress(base64.b64decode(name.removeprefix(_COUNTER))) for name in _take_replayed(compiling))
    found = [Report.from_json(text.decode()) for text in texts]
    name = dynamo.compile_name() if named and dynamo.compile_name() != "graph" else ""
    return [replace(one, graph=name or one.graph, from_cache=True, notes=with_own_breaks(one.notes)) for one in found]


def _refused(cached: Sequence[Report], config: Config, *, joint: bool = False) -> list[str]:
    """Why graphs from a cache cannot run as they are: the ranks' answers now are not those of then.

    A backward that comes with its forward is not waited for: on other ranks it may be compiled only when it runs, which
    takes this rank's forward. So it stands if its answer is known by then, and is compiled anew otherwise.

    joint: The graph that they were made of was not seen here either: its questions are asked too.
    """
    with_forward = any(report.phase != "backward" for report in cached)
    own = [one for report in cached for one in report.questions]
    before = dict.fromkeys(asked for one in own for asked in one.joint) if joint else {}
    late = [one for one in own if one.phase == "backward" and with_forward]
    questions = [*before, *own]
    found = list[str]()
    for question, answer in zip(questions, ask(questions, config, late), strict=True):
        now = question.with_answer(answer)
        if not answer.known or (now.done, now.kept) != (question.done, question.kept):
            found += dict.fromkeys(answer.refused.values()) or [f"all ranks agree now on {'; '.join(answer.agreed)}"]
    return found


def _cached_in_vain(refused: Sequence[str]) -> str:
    return (
        f"a graph that Inductor's cache had cannot run here, since ranks differ: {'; '.join(refused)}. Ranks that "
        "share no cache, or find different things in it, need TORCHINDUCTOR_FORCE_DISABLE_CACHES=1 in the environment"
    )


def _take_replayed(compiling: bool) -> list[str]:
    """Take our names out of Inductor's counters and return those that came back from a cache entry.

    What stays for a cache entry that is not made yet is never missing in between: another thread may make it now.
    """
    with _lock:
        counters = inductor_compile.cached_counters()
        held = collections.Counter({name: count for name, count in list(counters.items()) if name.startswith(_COUNTER)})
        own = _sent & held
        _sent.clear()
        for name in held:
            if compiling and own[name]:
                counters[name] = _sent[name] = own[name]
            else:
                del counters[name]
        return list((held - own).elements())


# --- report sinks -----------------------------------------------------------------------------------------
def _publish(
    report: Report,
    config: Config | None,
    before: fx.Graph | None = None,
    after: fx.Graph | None = None,
    *,
    names: graph_page.Names | None = None,
    across: bool = False,
    raised: bool = False,
    strayed: bool = False,
) -> None:
    """Keep the report, and send it to the log, the trace, and the file and the page that the configuration names.

    across: It is of chains that lie in two graphs. raised: An error has its text, so the log need not. strayed: It came
    from the cache, and the compile under way may be another one.
    """
    if config is not None and not (across or raised or strayed):
        with contained("note the graph, should torch give its function up"):
            leaving.note(report, config)
    with contained("keep the picture of the process"):
        picture.note(report, across, raised=raised, strayed=strayed)
    hides = report.matmuls and any(note.kind == "opaque" for note in report.notes)  # what may communicate
    if not (report.remarks or report.internal_errors or hides):
        return
    with _lock:
        _reports.append(report)
    if config is None:
        return
    if not raised:
        with contained("log the report"):
            _log(report)
    with contained("trace the report"):
        dynamo.trace(f"asynctp_{report.phase}_report", report.to_json)
    if config.report_file is not None:
        with _or_warn("report_file", config.report_file):
            files.write(config.report_file, report.to_json() + "\n", append=True)
    if config.graph_dir is not None:
        with _or_warn("graph_dir", config.graph_dir):
            _draw(config.graph_dir, before, after, report, names)


@contextlib.contextmanager
def _or_warn(option: str, place: str) -> Iterator[None]:
    """No full disk ends a program for the sake of a report of it, and no page that cannot be drawn."""
    with contained(f"write {option}={place!r}"):
        try:
            yield
        except OSError as error:
            log.warning(
                "asynctp: %s=%r could not be written (%s); the program goes on, and asynctp_passes.reports() has the "
                "report. Remedy: %s",
                *(option, place, error, files.remedy(error, folder=option == "graph_dir")),
            )


def _log(report: Report) -> None:
    for note in report.notes:
        level = logging.INFO if note.informs else logging.WARNING
        log.log(level, "asynctp: %s (%s): %s", report.graph, report.phase, note)
    for remark in report.remarks:
        log.log(logging.WARNING if remark.outcome == "MISSED" else logging.INFO, "asynctp: %s", remark)
    log.info(
        "asynctp: %s (%s%s): %s; the pass took %.2f s",
        *(report.graph, report.phase, ", from Inductor's cache" if report.from_cache else ""),
        *(report.totals, report.seconds),
    )


def _draw(
    graph_dir: str, before: fx.Graph | None, after: fx.Graph | None, report: Report, names: graph_page.Names | None
) -> None:
    if before is None or after is None:
        log.info("asynctp: %s came from Inductor's cache: there is no graph to draw into %s", report.graph, graph_dir)
        return
    from asynctp_passes.reporting import graph_page

    page = graph_page.write_page(graph_dir, before, after, report, names)
    log.info("asynctp: graph before and after: %s", page)


def _copy(graph: fx.Graph) -> fx.Graph:
    """A copy to draw: same names, same metadata."""
    copy = fx.Graph()
    nodes: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        nodes[node] = copy.node_copy(node, nodes.__getitem__)
        nodes[node].name = node.name
    return copy
