"""Every field of the configuration: what it takes, what it refuses and with which words, and where it is read."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from ranks import imagined_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.fx import Graph, GraphModule

from asynctp_passes import AsyncTPPass, Config, ConfigError, RematerializePass, run
from asynctp_passes.backend import split_options
from asynctp_passes.config import RUNTIME_VARIABLES, cpu_implementation, required

SINKS = {"report_file": "reports.jsonl", "graph_dir": "pages"}
OTHERS: dict[str, Any] = {
    "groups": "tp",
    "strict": "all",
    "expect": 1,
    "min_bytes": 1,
    "min_flops": 1,
    "skip": "bucket",
    "deviate": False,
    "direct": False,
    "rematerialize": "always",
    "invariant": "batch",
}

BAD = [
    # field, value, what the message must name besides the field and the value
    ("groups", (), '"auto" or at least one group'),
    ("groups", "", "a non-empty group name"),
    ("groups", ("tp", ""), "a non-empty group name"),
    ("groups", 3, "group names, ProcessGroups or DeviceMeshes"),
    ("groups", ("tp", None), "group names, ProcessGroups or DeviceMeshes"),
    ("strict", "some", "one of ('off', 'zero', 'all')"),
    ("strict", True, "one of ('off', 'zero', 'all')"),
    ("strict", None, "one of ('off', 'zero', 'all')"),
    ("expect", -1, "an integer >= 0"),
    ("expect", 1.0, "an integer >= 0"),
    ("expect", True, "an integer >= 0"),
    ("min_bytes", -1, "an integer >= 0"),
    ("min_bytes", "1 MiB", "an integer >= 0"),
    ("min_flops", -1, "an integer >= 0"),
    ("min_flops", None, "an integer >= 0"),
    ("skip", "buckets", "names of steps, of ('hoist', 'overlap', 'bucket', 'store_scales'); did you mean 'bucket'?"),
    ("skip", None, "names of steps"),
    ("skip", ("hoist", 2), "names of steps"),
    ("skip", "hoist,bucket", "names of steps"),
    ("rematerialize", "some", "one of ('auto', 'always', 'never')"),
    ("rematerialize", False, "one of ('auto', 'always', 'never')"),
    ("invariant", "rows", "one of ('auto', 'off', 'batch')"),
    ("deviate", "never", "True or False"),
    ("direct", 1, "True or False"),
    ("report_file", "", "a path, or None"),
    ("report_file", 3, "a path, or None"),
    ("report_file", "/", "a file that can be written, in a folder that is there or can be made"),
    (
        "report_file",
        f"{__file__}/reports.jsonl",
        "a file that can be written, in a folder that is there or can be made",
    ),
    ("report_file", "x" * 300, "a file that can be written, in a folder that is there or can be made"),
    ("report_file", "a\0b", "a file that can be written, in a folder that is there or can be made"),
    ("graph_dir", "x" * 300, "a folder that can be written, or that can be made"),
    ("graph_dir", __file__, "a folder that can be written, or that can be made"),
    ("graph_dir", "", "a path, or None"),
    ("graph_dir", True, "a path, or None"),
]

BAD_VARIABLES = [
    # variable, text, what the message must name besides them
    ("ASYNCTP_STRICT", "ALL", "one of ('off', 'zero', 'all')"),
    ("ASYNCTP_EXPECT", "many", "an integer >= 0"),
    ("ASYNCTP_EXPECT", "-1", "an integer >= 0"),
    ("ASYNCTP_MIN_BYTES", "1e6", "an integer >= 0"),
    ("ASYNCTP_MIN_FLOPS", "", "an integer >= 0"),
    ("ASYNCTP_DIRECT", "2", "one of ('1', 'true', 'on', '0', 'false', 'off')"),
    ("ASYNCTP_REMATERIALIZE", "1", "one of ('auto', 'always', 'never')"),
    ("ASYNCTP_INVARIANT", "1", "one of ('auto', 'off', 'batch')"),
    ("ASYNCTP_GROUPS", " , ", '"auto" or at least one group'),
    ("ASYNCTP_SKIP", "overlaps", "did you mean 'overlap'?"),
    ("ASYNCTP_DEVIATE", "never", "one of ('1', 'true', 'on', '0', 'false', 'off')"),
    ("ASYNCTP_STRICTT", "all", "did you mean 'ASYNCTP_STRICT'?"),
]

GOOD_VARIABLES = [
    # variable, text, field, value
    ("ASYNCTP_GROUPS", "auto", "groups", "auto"),
    ("ASYNCTP_GROUPS", " auto ", "groups", "auto"),
    ("ASYNCTP_GROUPS", "tp", "groups", ("tp",)),
    ("ASYNCTP_GROUPS", " tp , cp,", "groups", ("cp", "tp")),
    ("ASYNCTP_STRICT", "all", "strict", "all"),
    ("ASYNCTP_EXPECT", "8", "expect", 8),
    ("ASYNCTP_MIN_BYTES", "1000000", "min_bytes", 1_000_000),
    ("ASYNCTP_MIN_FLOPS", "0", "min_flops", 0),
    ("ASYNCTP_SKIP", " hoist , bucket,", "skip", ("bucket", "hoist")),
    ("ASYNCTP_SKIP", "", "skip", ()),
    ("ASYNCTP_REMATERIALIZE", "always", "rematerialize", "always"),
    ("ASYNCTP_INVARIANT", "batch", "invariant", "batch"),
    ("ASYNCTP_DEVIATE", "0", "deviate", False),
    ("ASYNCTP_DIRECT", "0", "direct", False),
    ("ASYNCTP_DIRECT", "OFF", "direct", False),
    ("ASYNCTP_DIRECT", "1", "direct", True),
    ("ASYNCTP_DEVIATE", "false", "deviate", False),
    ("ASYNCTP_REPORT_FILE", "/tmp/reports.jsonl", "report_file", "/tmp/reports.jsonl"),
    ("ASYNCTP_REPORT_FILE", "", "report_file", None),
    ("ASYNCTP_GRAPH_DIR", "pages", "graph_dir", "pages"),
]


# --- values --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("field", "value", "limit"), BAD, ids=str)
def test_bad_values_are_named_with_their_limit(field: str, value: object, limit: str) -> None:
    with pytest.raises(ConfigError) as raised:
        Config(**{field: value})
    message = str(raised.value)
    assert message.startswith(f"asynctp: {field}")
    assert limit in message
    assert repr(value) in message or any(repr(member) in message for member in (value if value else ()))  # type: ignore[attr-defined]


def test_every_field_has_a_bad_value() -> None:
    assert {field for field, _, _ in BAD} == set(Config.field_names())


def test_config_error_is_a_value_error() -> None:
    assert issubclass(ConfigError, ValueError)


def test_paths_become_text() -> None:
    config = Config(report_file=Path("a") / "b.jsonl", graph_dir=Path("c"))  # type: ignore[arg-type]
    assert (config.report_file, config.graph_dir) == ("a/b.jsonl", "c")


def test_unknown_options_are_refused() -> None:
    with pytest.raises(
        ConfigError,
        match=r"option='strickt' is not valid; it must be one of \('groups', 'strict'.*; did you mean 'strict'\?",
    ):
        Config.from_options({"strickt": "all"}, environ={})


@pytest.mark.parametrize("take", [AsyncTPPass, RematerializePass, lambda config: run(Graph(), config)])
def test_a_dictionary_is_refused_where_a_config_is_wanted(take: Callable[[Any], Any]) -> None:
    with pytest.raises(ConfigError, match="it must be a Config or None"):
        take({"strict": "all"})


def test_a_graph_module_is_refused_where_a_graph_is_wanted() -> None:
    with pytest.raises(TypeError, match="graph=GraphModule is not valid; it must be"):
        run(GraphModule({}, Graph()))  # type: ignore[arg-type]


# --- names that are no options ---------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["regather", "coalesce", "agree", "bucket", "store_scales"])
def test_names_of_earlier_versions_are_unknown(name: str) -> None:
    with pytest.raises(ConfigError, match=f"option='{name}' is not valid; it must be one of"):
        Config.from_options({name: False}, {})
    with pytest.raises(ConfigError, match=f"option '{name}' is not valid; it must be one of"):
        split_options({name: False})
    with pytest.raises(ConfigError, match=f"ASYNCTP_{name.upper()}' is not valid; it must be one of"):
        Config.from_options(environ={f"ASYNCTP_{name.upper()}": "0"})


# --- steps -----------------------------------------------------------------------------------------------------
def test_steps_are_kept_as_sorted_names() -> None:
    assert Config(skip="hoist").skip == ("hoist",)
    assert (
        Config(skip=["hoist", "bucket", "hoist"])
        == Config(skip={"bucket", "hoist"})
        == Config(skip=("bucket", "hoist"))
    )


def test_an_unknown_step_is_refused_with_the_nearest_name() -> None:
    limit = r"skip='hoits' is not valid; it must be names of steps, of \('hoist', .*\); did you mean 'hoist'\?"
    with pytest.raises(ConfigError, match=limit):
        Config(skip=("bucket", "hoits"))
    with pytest.raises(ConfigError, match=rf"{limit} \(set by ASYNCTP_SKIP='bucket,hoits'\)"):
        Config.from_options(environ={"ASYNCTP_SKIP": "bucket,hoits"})


# --- the environment -----------------------------------------------------------------------------------------
@pytest.mark.parametrize(("variable", "text", "field", "value"), GOOD_VARIABLES)
def test_variables(variable: str, text: str, field: str, value: object) -> None:
    assert Config.from_options(environ={variable: text, "PATH": "/bin"}) == Config(**{field: value})  # type: ignore[arg-type]


def test_every_field_has_a_variable() -> None:
    assert {field for _, _, field, _ in GOOD_VARIABLES} == set(Config.field_names())


@pytest.mark.parametrize(("variable", "text", "limit"), BAD_VARIABLES)
def test_bad_variables_are_named_with_their_limit(variable: str, text: str, limit: str) -> None:
    with pytest.raises(ConfigError) as raised:
        Config.from_options(environ={variable: text})
    message = str(raised.value)
    assert variable in message or variable.removeprefix("ASYNCTP_").lower() in message
    assert limit in message


def test_options_win_over_variables_and_variables_over_defaults() -> None:
    environ = {"ASYNCTP_STRICT": "all", "ASYNCTP_EXPECT": "3"}
    config = Config.from_options({"strict": "off"}, environ)
    assert (config.strict, config.expect, config.min_bytes) == ("off", 3, 0)


def test_the_process_environment_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASYNCTP_MIN_FLOPS", "7")
    assert Config.from_options().min_flops == 7
    assert Config().min_flops == 0, "a Config built by hand does not depend on the environment"


@pytest.mark.parametrize("name", RUNTIME_VARIABLES)
def test_variables_of_the_running_ops_are_no_fields(name: str) -> None:
    assert Config.from_options(environ={f"ASYNCTP_{name.upper()}": "30"}) == Config()


def test_cpu_implementation() -> None:
    key = "ASYNCTP_CPU_IMPLEMENTATION"
    assert cpu_implementation({}) == "reference"
    assert cpu_implementation({key: "interpreted"}) == "interpreted"
    with pytest.raises(ConfigError, match=r"ASYNCTP_CPU_IMPLEMENTATION='fast' .* \('reference', 'interpreted'\)"):
        cpu_implementation({key: "fast"})


# --- groups --------------------------------------------------------------------------------------------------
@pytest.fixture
def world() -> Iterator[None]:
    """A process group of four ranks that communicates with no one."""
    with imagined_ranks(4):
        yield


def test_groups_are_kept_as_sorted_names() -> None:
    assert Config(groups="tp").groups == ("tp",)
    assert Config(groups=["tp", "cp", "tp"]) == Config(groups={"cp", "tp"}) == Config(groups=("cp", "tp"))


@pytest.mark.usefixtures("world")
def test_groups_from_process_groups_and_meshes() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    group = mesh["tp"].get_group()
    expected = Config(groups=group.group_name)
    assert Config(groups=group) == expected
    assert Config(groups=mesh["tp"]) == expected
    assert Config(groups=[group, mesh["tp"], group.group_name]) == expected
    assert Config(groups=[mesh["tp"], mesh["dp"]]).groups == tuple(
        sorted(str(mesh[name].get_group().group_name) for name in ("dp", "tp"))
    )


@pytest.mark.usefixtures("world")
def test_a_mesh_of_two_dimensions_is_refused_with_the_remedy() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    with pytest.raises(ConfigError, match=r'a mesh of one dimension \(slice it first: mesh\["tp"\]\)'):
        Config(groups=mesh)


@pytest.mark.usefixtures("world")
def test_a_config_holds_no_process_group() -> None:
    config = Config(groups=dist.group.WORLD)
    assert isinstance(config.groups, tuple)
    assert all(type(name) is str for name in config.groups)
    assert pickle.loads(pickle.dumps(config)) == config


# --- a value among values --------------------------------------------------------------------------------------
def test_frozen_hashable_picklable() -> None:
    config = Config(groups=["tp"], strict="all")
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.strict = "off"  # type: ignore[misc]
    assert len({config, Config(groups=("tp",), strict="all"), Config()}) == 2
    assert pickle.loads(pickle.dumps(config)) == config


@pytest.mark.parametrize("field", SINKS)
def test_sinks_leave_the_digest_alone(field: str) -> None:
    changed = dataclasses.replace(Config(), **{field: SINKS[field]})
    assert changed != Config()
    assert changed.digest() == Config().digest()


@pytest.mark.parametrize("field", OTHERS)
def test_all_other_fields_change_the_digest(field: str) -> None:
    assert dataclasses.replace(Config(), **{field: OTHERS[field]}).digest() != Config().digest()


def test_every_field_is_a_sink_or_changes_the_digest() -> None:
    assert {*SINKS, *OTHERS} == set(Config.field_names())


def test_the_digest_is_the_same_in_every_process() -> None:
    """It is part of the key of caches on disk."""
    assert Config().digest() == "3015f4b9040e24ef"
    assert Config(groups=["b", "a"], strict="all").digest() == Config(groups=("a", "b"), strict="all").digest()


@pytest.mark.parametrize(
    ("text", "found"),
    [("", {}), (" missed = 0 ", {"missed": 0}), ("fused=12, missed=3,", {"fused": 12, "missed": 3})],
)
def test_what_a_process_must_do(text: str, found: dict[str, int]) -> None:
    assert required({"ASYNCTP_REQUIRE": text}) == required({"ASYNCTP_REQUIRE": text, "ASYNCTP_OTHER": "1"}) == found


@pytest.mark.parametrize(
    "text", ["fused", "fused=", "fused=-1", "fused=1.5", "fuse=1", "fused=1,fused=1", "fused=1;missed=0"]
)
def test_what_no_process_can_be_asked(text: str) -> None:
    with pytest.raises(ConfigError, match=r"ASYNCTP_REQUIRE='.*' is not valid; it must be fused=N, missed=N or both"):
        required({"ASYNCTP_REQUIRE": text})
