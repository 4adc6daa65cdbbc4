"""Every field of the configuration: what it takes, what it refuses and with which words, and where it is read."""

from __future__ import annotations

import dataclasses
import pickle
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from ranks import imagined_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.fx import Graph, GraphModule

import asynctp_passes
from asynctp_passes import AsyncTPPass, Config, ConfigError, RematerializePass, run
from asynctp_passes.backend import split_options
from asynctp_passes.config import RUNTIME_VARIABLES, cpu_implementation

SINKS = {"log": False, "trace": False, "report_file": "reports.jsonl", "graph_dir": "pages"}
OTHERS: dict[str, Any] = {
    "groups": "tp",
    "strict": "all",
    "expect": 1,
    "min_bytes": 1,
    "min_flops": 1,
    "bucket": False,
    "deviate": False,
    "direct": False,
    "store_scales": False,
    "rematerialize": "always",
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
    ("bucket", None, "True or False"),
    ("store_scales", 2, "True or False"),
    ("rematerialize", "some", "one of ('auto', 'always', 'never')"),
    ("rematerialize", False, "one of ('auto', 'always', 'never')"),
    ("deviate", "never", "True or False"),
    ("direct", 1, "True or False"),
    ("log", 1, "True or False"),
    ("trace", "yes", "True or False"),
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
    ("ASYNCTP_LOG", "maybe", "one of ('1', 'true', 'on', '0', 'false', 'off')"),
    ("ASYNCTP_TRACE", "2", "one of ('1', 'true', 'on', '0', 'false', 'off')"),
    ("ASYNCTP_REMATERIALIZE", "1", "one of ('auto', 'always', 'never')"),
    ("ASYNCTP_GROUPS", " , ", '"auto" or at least one group'),
    ("ASYNCTP_AGREE", "never", "one of ('1', 'true', 'on', '0', 'false', 'off')"),
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
    ("ASYNCTP_BUCKET", "0", "bucket", False),
    ("ASYNCTP_STORE_SCALES", "off", "store_scales", False),
    ("ASYNCTP_REMATERIALIZE", "always", "rematerialize", "always"),
    ("ASYNCTP_DEVIATE", "0", "deviate", False),
    ("ASYNCTP_DIRECT", "0", "direct", False),
    ("ASYNCTP_LOG", "OFF", "log", False),
    ("ASYNCTP_LOG", "1", "log", True),
    ("ASYNCTP_TRACE", "false", "trace", False),
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


# --- earlier names --------------------------------------------------------------------------------------------
EARLIER = [("regather", "rematerialize", "never"), ("coalesce", "bucket", False)]


@pytest.mark.parametrize(("earlier", "now", "value"), EARLIER)
def test_earlier_names_of_fields_are_taken_with_a_warning(earlier: str, now: str, value: Any) -> None:
    with pytest.warns(FutureWarning, match=f"is named '{earlier}', which is now '{now}'") as told:
        made = [
            Config(**{earlier: value}),
            Config.from_options({earlier: value}, {}),
            split_options({earlier: value})[0],
        ]
    assert made == [Config(**{now: value})] * 3
    assert len(told) == 3
    assert told[0].filename == __file__


@pytest.mark.parametrize(("earlier", "now", "value"), EARLIER)
def test_earlier_names_of_variables_are_read_with_a_warning(earlier: str, now: str, value: Any) -> None:
    variable, text = f"ASYNCTP_{earlier.upper()}", {"never": "never", False: "off"}[value]
    with pytest.warns(FutureWarning, match=f"is named '{variable}', which is now 'ASYNCTP_{now.upper()}'"):
        assert Config.from_options(environ={variable: text}) == Config(**{now: value})


@pytest.mark.parametrize(("earlier", "now", "value"), EARLIER)
def test_a_field_by_both_names_is_refused(earlier: str, now: str, value: Any) -> None:
    limit = f"{earlier}={value!r} is not valid; it must be left out, since {now!r} is given"
    for make in (lambda both: Config(**both), lambda both: Config.from_options(both, {})):
        with pytest.raises(ConfigError, match=re.escape(limit)):
            make({earlier: value, now: value})
    variables = {f"ASYNCTP_{name.upper()}": "auto" for name in (earlier, now)}
    with pytest.raises(ConfigError, match=f"ASYNCTP_{earlier.upper()}='auto' is not valid; it must be left out"):
        Config.from_options(environ=variables)


@pytest.mark.parametrize(("earlier", "now", "value"), EARLIER)
def test_nothing_is_read_by_an_earlier_name(earlier: str, now: str, value: Any) -> None:
    config = Config(**{now: value})
    assert earlier not in Config.field_names()
    with pytest.raises(AttributeError, match=earlier):
        getattr(config, earlier)
    assert dataclasses.replace(config, strict="all") == Config(**{now: value}, strict="all")


@pytest.mark.parametrize("options", [{"agree": False}, {"agree": False, "deviate": True}], ids=str)
def test_no_rank_deviates_without_asking_the_others(options: dict[str, bool]) -> None:
    """`agree=False` of version 0.2.0 is read as `deviate=False`, and told once; it reaches the keys of caches so."""
    with pytest.warns(FutureWarning, match="'agree=False', which is now 'deviate=False'") as told:
        made = [Config(**options), Config.from_options(options, {}), split_options(options)[0]]
    assert made == [Config(deviate=False)] * 3
    assert {one.digest() for one in made} == {Config(deviate=False).digest()}
    assert len(told) == 3
    assert told[0].filename == __file__
    variables = {f"ASYNCTP_{name.upper()}": "1" if value else "0" for name, value in options.items()}
    for environ in (variables, dict(reversed(variables.items()))):
        with pytest.warns(FutureWarning, match="a variable is 'agree=False'") as told:
            assert Config.from_options(environ=environ) == Config(deviate=False)
        assert len(told) == 1


@pytest.mark.filterwarnings("error")
def test_to_ask_the_others_is_no_option() -> None:
    assert Config(agree=True) == Config.from_options({"agree": True}, {"ASYNCTP_AGREE": "1"}) == Config()  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="agree='all' is not valid; it must be True or False"):
        Config.from_options({"agree": "all"}, {})


@pytest.mark.parametrize(("earlier", "now"), [("RegatherPass", "RematerializePass"), ("Coalesced", "Bucketed")])
def test_earlier_names_of_classes_are_importable_with_a_warning(earlier: str, now: str) -> None:
    with pytest.warns(FutureWarning, match=f"asynctp_passes.{earlier} is now asynctp_passes.{now}"):
        assert getattr(asynctp_passes, earlier) is getattr(asynctp_passes, now)


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
    assert Config().digest() == "9b017f4466f91555"
    assert Config(groups=["b", "a"], strict="all").digest() == Config(groups=("a", "b"), strict="all").digest()
