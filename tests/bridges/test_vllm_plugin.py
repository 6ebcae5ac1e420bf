"""The plugin: its variables, what it hooks and what it refuses, and the cross-check, on a stand-in for vLLM."""

import json
import os
import shutil
import subprocess
import sys
import types

import numpy as np
import pytest
from test_vllm_replacements import metadata, random_step

torch = pytest.importorskip("torch")

from fly_jax import FlyConfig  # noqa: E402
from fly_jax.bridges.vllm import counting, crosscheck, hooks, interface, plugin, settings, v1  # noqa: E402

pytestmark = pytest.mark.torch


def test_the_variables_are_named_as_the_fields_of_flyconfig():
    assert {"rejection_sample_method", *FlyConfig.vllm_names().values()} == settings._FLY_FIELDS.keys()


@pytest.mark.parametrize("value", [None, ""])
def test_the_plugin_is_off_unless_asked(value):
    assert settings.from_environment({} if value is None else {"FLY_JAX_VLLM": value}) is None


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"FLY_JAX_VLLM": "on"}, "FLY_JAX_VLLM must be replace, crosscheck or record"),
        ({"FLY_JAX_VLLM": "replace", "FLY_JAX_FLY_WINDOW_SIZE": "six"}, "FLY_JAX_FLY_WINDOW_SIZE must be an integer"),
        (
            {"FLY_JAX_VLLM": "replace", "FLY_JAX_FLY_ENTROPY_THRESHOLD": "x"},
            "FLY_JAX_FLY_ENTROPY_THRESHOLD must be a number, got 'x'",
        ),
        (
            {"FLY_JAX_VLLM": "replace", "FLY_JAX_FLY_WINDOW_SIZE": "6"},
            "FLY_JAX_FLY_WINDOW_SIZE has no effect without FLY_JAX_REJECTION_SAMPLE_METHOD=fly",
        ),
        ({"FLY_JAX_VLLM": "replace", "FLY_JAX_WINDOW_SIZE": "6"}, "FLY_JAX_WINDOW_SIZE is not a variable of fly_jax"),
        ({"FLY_JAX_VLM": "replace"}, "FLY_JAX_VLM is not a variable of fly_jax"),
        ({"FLY_JAX_REJECTION_SAMPLE_METHOD": "fly"}, "has no effect without FLY_JAX_VLLM=replace"),
        ({"FLY_JAX_VLLM": "crosscheck", "FLY_JAX_VLLM_RECORDS": "-1"}, "FLY_JAX_VLLM_RECORDS must be at least 0"),
        ({"FLY_JAX_VLLM": "record", "FLY_JAX_VLLM_RECORD_ROWS": "0"}, "FLY_JAX_VLLM_RECORD_ROWS must be at least 1"),
    ],
)
def test_wrong_variables_are_named(environment, words):
    with pytest.raises(ValueError, match=words):
        settings.from_environment(environment)


def test_variables_are_fields_of_the_speculative_config(tmp_path):
    given = settings.from_environment(
        {
            "FLY_JAX_VLLM": "replace",
            "FLY_JAX_REJECTION_SAMPLE_METHOD": "fly",
            "FLY_JAX_FLY_WINDOW_SIZE": "4",
            "FLY_JAX_FLY_ENTROPY_THRESHOLD": "0.5",
            "FLY_JAX_FLY_ENTROPY_TOP_K": "2",
            "FLY_JAX_VLLM_FOLDER": str(tmp_path),
            "FLY_JAX_VLLM_RECORDS": "3",
            "FLY_JAX_CACHE": "elsewhere",
        }
    )
    assert given.fly == {
        "rejection_sample_method": "fly",
        "fly_window_size": 4,
        "fly_entropy_threshold": 0.5,
        "fly_entropy_top_k": 2,
    }
    assert (given.folder, given.records) == (tmp_path, 3)


def stand_in(version="0.32.0", *, is_cpu=True, has_triton=False, has_fly=False):
    """Modules with what the plugin touches in vLLM, and a `rejection_sample` that keeps every draft."""
    module = types.ModuleType(hooks.V1_MODULE)

    def rejection_sample(
        draft_token_ids,
        num_draft_tokens,
        max_spec_len,
        cu_num_draft_tokens,
        draft_probs,
        target_logits,
        bonus_token_ids,
        sampling_metadata,
        synthetic_mode=False,
        synthetic_conditional_rates=None,
        use_fp64_gumbel=False,
    ):
        torch.rand(3)  # it draws as well
        output = torch.full((len(num_draft_tokens), max_spec_len + 1), -1, dtype=torch.int32)
        start = 0
        for b, n in enumerate(num_draft_tokens):
            output[b, :n] = draft_token_ids[start : start + n]
            output[b, n] = bonus_token_ids[b, 0]
            start += n
        return output

    class RejectionSampler:
        def __init__(self, sampler, spec_config=None, device=None):
            self.device = device
            self.use_fp64_gumbel = sampler == "fp64"

        def forward(self, **step):
            return module.rejection_sample(**step)

    def with_fly(*args, fly_window_size=None, fly_entropy_threshold=None, fly_entropy_top_k=3, **kwargs):
        return rejection_sample(*args, **kwargs)

    if has_fly:
        import inspect

        signature = inspect.signature(rejection_sample)
        extra = [
            inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default)
            for name, default in (
                ("fly_window_size", None),
                ("fly_entropy_threshold", None),
                ("fly_entropy_top_k", 3),
            )
        ]
        with_fly.__signature__ = signature.replace(parameters=[*signature.parameters.values(), *extra])
    module.rejection_sample = with_fly if has_fly else rejection_sample
    module.RejectionSampler = RejectionSampler
    module.apply_sampling_constraints = lambda logits, *_: logits / logits.numel()
    module.expand_batch_to_tokens = lambda *_: None
    v2_module = types.ModuleType(hooks.V2_MODULE)
    v2_module.RejectionSampler = type("RejectionSampler", (), {})
    platforms = types.ModuleType("vllm.platforms")
    platforms.current_platform = types.SimpleNamespace(is_cpu=lambda: is_cpu)
    triton_utils = types.ModuleType("vllm.triton_utils")
    triton_utils.HAS_TRITON = has_triton
    vllm = types.ModuleType("vllm")
    vllm.__version__ = version
    others = {"vllm.platforms": platforms, "vllm.triton_utils": triton_utils}
    return {"vllm": vllm, **others, hooks.V1_MODULE: module, hooks.V2_MODULE: v2_module}


@pytest.fixture
def vllm(monkeypatch, tmp_path):
    """`vllm(mode, **options)` puts the stand-in in the place of vLLM, registers the plugin, returns the V1 module."""
    for name in list(os.environ):
        if name.startswith(("FLY_JAX_VLLM", "FLY_JAX_FLY", "FLY_JAX_REJ", "XLA_PYTHON_CLIENT")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    monkeypatch.setenv("FLY_JAX_VLLM_FOLDER", str(tmp_path))
    monkeypatch.setattr(counting.multiprocessing.util, "Finalize", lambda *_, **__: None)

    def install(mode, *, variables=(), change=lambda module: None, **options):
        modules = stand_in(**options)
        change(modules[hooks.V1_MODULE])
        for name, module in modules.items():
            monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.setenv("FLY_JAX_VLLM", mode)
        for name, value in dict(variables).items():
            monkeypatch.setenv(name, value)
        plugin.register()
        return modules[hooks.V1_MODULE]

    return install


def test_registering_twice_hooks_once_and_logs_once(vllm, caplog):
    with caplog.at_level("INFO", "vllm.fly_jax"):
        module = vllm("replace")
        hooked = module.rejection_sample
        plugin.register()
    assert module.rejection_sample is hooked
    assert len(caplog.records) == 1
    for words in ("vLLM 0.32.0", "decides in JAX", "rejection_sample", "lossy", "FLy itself is off"):
        assert words in caplog.text


@pytest.mark.parametrize("version", ["0.31.2", "0.34.0", "1.0", "dev", "0.33.0"])
def test_only_known_versions_are_hooked(vllm, version):
    if version == "0.33.0":
        vllm("crosscheck", version=version)
        return
    with pytest.raises(
        RuntimeError, match=rf"knows vLLM 0.32 and 0.33 only, and this is {version}.*unset FLY_JAX_VLLM"
    ):
        vllm("crosscheck", version=version)


@pytest.mark.parametrize("name", ["rejection_sample", "RejectionSampler", "expand_batch_to_tokens"])
def test_a_missing_hook_is_an_error(vllm, name):
    with pytest.raises(RuntimeError, match=f"has no {name}"):
        vllm("replace", change=lambda module: delattr(module, name))


def test_another_signature_is_an_error(vllm):
    def change(module):
        module.rejection_sample = lambda draft_token_ids, other: None

    with pytest.raises(RuntimeError, match="other parameters"):
        vllm("replace", change=change)


@pytest.mark.parametrize("platform", [{"is_cpu": False}, {"is_cpu": True, "has_triton": True}])
def test_an_engine_of_the_v2_runner_is_refused(vllm, platform):
    vllm("replace", **platform)
    with pytest.raises(RuntimeError, match="VLLM_USE_V2_MODEL_RUNNER=0"):
        sys.modules[hooks.V2_MODULE].RejectionSampler()


def test_fly_variables_are_for_versions_without_fly_and_for_replace(vllm):
    with pytest.raises(ValueError, match=r"is for vLLM before 0\.33"):
        vllm("replace", version="0.33.0", variables={"FLY_JAX_REJECTION_SAMPLE_METHOD": "fly"})
    with pytest.raises(ValueError, match="needs FLY_JAX_VLLM=replace"):
        vllm("crosscheck", variables={"FLY_JAX_REJECTION_SAMPLE_METHOD": "fly"})


def spec_config(**fields):
    given = {
        "num_speculative_tokens": 8,
        "rejection_sample_method": "standard",
        "draft_sample_method": "greedy",
        **fields,
    }
    return types.SimpleNamespace(**given)


def undecided_step():
    """Greedy drafts whose position 1 the target rejects, undecided, and whose others it accepts."""
    logits = torch.zeros((8, 16))
    drafts = torch.arange(8, dtype=torch.int32)
    logits[torch.arange(8), drafts.long()] = 9.0
    logits[1, 0] = 9.5
    step = random_step(np.random.default_rng(0), [8])
    return {**step, "draft_token_ids": drafts, "target_logits": logits, "sampling_metadata": metadata([0.0])}


def test_fly_from_the_plugins_variables_decides_in_an_engine_without_fly(vllm):
    variables = {"FLY_JAX_REJECTION_SAMPLE_METHOD": "fly", "FLY_JAX_FLY_WINDOW_SIZE": "2"}
    module = vllm("replace", variables=variables)
    sampler = module.RejectionSampler(None, spec_config(), torch.device("cpu"))
    assert sampler.forward(**undecided_step()).tolist() == [[0, 1, 2, 3, 4, 5, 6, 7, 0]]
    counted = plugin.counters()
    assert (counted["steps"], counted["draft_tokens"], counted["accepted"], counted["deferred"]) == (1, 8, 8, 1)
    # Without the sampler whose settings they are, there is no FLy.
    assert module.rejection_sample(**undecided_step())[0, :2].tolist() == [0, 0]


@pytest.mark.parametrize(
    ("fields", "variables", "words"),
    [
        ({}, {"FLY_JAX_FLY_WINDOW_SIZE": "8"}, "fly_window_size must be less than num_speculative_tokens"),
        ({}, {"FLY_JAX_FLY_ENTROPY_THRESHOLD": "-1"}, "fly_entropy_threshold must be at least 0"),
        ({"num_speculative_tokens": 1}, {}, "num_speculative_tokens must be at least 2"),
        ({"rejection_sample_method": "synthetic"}, {}, "excludes rejection_sample_method='synthetic'"),
    ],
)
def test_fly_from_variables_is_validated_as_vllms_own(vllm, fields, variables, words):
    module = vllm("replace", variables={"FLY_JAX_REJECTION_SAMPLE_METHOD": "fly", **variables})
    with pytest.raises(ValueError, match=words):
        module.RejectionSampler(None, spec_config(**fields), torch.device("cpu"))


def test_fly_of_vllm_itself_runs_on_a_cpu(vllm):
    module = vllm("replace", version="0.33.0", has_fly=True)
    sampler = module.RejectionSampler(None, spec_config(rejection_sample_method="fly"), torch.device("cpu"))
    assert sampler.device is None  # what vLLM 0.33 refuses FLy by
    assert module.RejectionSampler(None, spec_config(), torch.device("cpu")).device is not None
    tokens = sampler.forward(**undecided_step(), fly_window_size=2, fly_entropy_threshold=0.3)
    assert tokens.tolist() == [[0, 1, 2, 3, 4, 5, 6, 7, 0]]


@pytest.mark.parametrize("mode", settings.MODES)
def test_synthetic_acceptance_is_left_to_vllm(vllm, mode, tmp_path):
    module = vllm(mode)
    assert module.rejection_sample(**undecided_step(), synthetic_mode=True)[0, 1] == 1
    assert plugin.counters()["steps_left_to_vllm"] == 1
    assert plugin.counters()["steps"] == 0
    (path,) = tmp_path.glob("counters-*.json")
    assert json.loads(path.read_text())["steps_left_to_vllm"] == 1


def test_fly_excludes_float64_noise_in_an_engine_that_has_no_fly(vllm):
    module = vllm("replace", variables={"FLY_JAX_REJECTION_SAMPLE_METHOD": "fly"})
    with pytest.raises(ValueError, match="excludes float64 Gumbel noise"):
        module.RejectionSampler("fp64", spec_config(), torch.device("cpu"))


def test_the_variables_reach_the_workers_of_ray(vllm, monkeypatch):
    monkeypatch.setenv("VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY", "MINE_")
    vllm("replace")
    plugin.register()
    assert os.environ["VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY"] == "MINE_,FLY_JAX_"


def test_what_vllm_loses_on_a_cpu_is_expanded(vllm):
    module = vllm("replace")
    expand = module.expand_batch_to_tokens
    cumulative = torch.tensor([2, 2, 5], dtype=torch.int32)
    assert torch.equal(
        expand(torch.tensor([0.5, 0.7, 0.0]), cumulative, 5, 0, 1), torch.tensor([0.5, 0.5, 1.0, 1.0, 1.0])
    )
    top_k = expand(torch.tensor([3, 4, 5], dtype=torch.int32), cumulative, 5)
    assert top_k.dtype == torch.int32
    assert top_k.tolist() == [3, 3, 5, 5, 5]
    assert module.apply_sampling_constraints(torch.zeros((0, 4)), None, None).shape == (0, 4)
    assert module.apply_sampling_constraints(torch.ones((1, 4)), None, None).tolist() == [[0.25] * 4]


def test_crosscheck_leaves_vllm_its_tokens_its_generators_and_its_inputs(vllm):
    module = vllm("crosscheck")
    generators = {0: torch.Generator().manual_seed(5)}
    step = random_step(np.random.default_rng(1), [4, 3], draft_probs=True)
    inputs = {name: value.clone() for name, value in step.items() if isinstance(value, torch.Tensor)}
    torch.manual_seed(9)
    expected = module.rejection_sample.fly_jax_session.original(**step, sampling_metadata=metadata([1.0, 1.0]))
    after = torch.get_rng_state()
    torch.manual_seed(9)
    tokens = module.rejection_sample(**step, sampling_metadata=metadata([1.0, 1.0], generators))
    assert torch.equal(tokens, expected)
    assert torch.equal(torch.get_rng_state(), after)
    assert torch.equal(generators[0].get_state(), torch.Generator().manual_seed(5).get_state())
    assert all(torch.equal(step[name], value) for name, value in inputs.items())


def test_crosscheck_counts_classes_and_records_the_first_few(vllm, tmp_path, caplog):
    module = vllm("crosscheck", variables={"FLY_JAX_VLLM_RECORDS": "2"})
    for _ in range(3):
        module.rejection_sample(**undecided_step())  # the stand-in keeps what greedy verification rejects
    counted = plugin.counters()
    assert counted["steps"] == 3
    assert counted["mismatches_real"] == 3
    assert counted["real_records_written"] == 2
    assert counted["overhead"] > 0
    assert caplog.text.count("1 real") == 3  # a real one is logged always
    (path,) = tmp_path.glob("counters-*.json")
    assert json.loads(path.read_text())["mismatches_real"] == 3
    records = sorted(tmp_path.glob("mismatch-*.npz"))
    assert len(records) == 2
    assert str(records[0]) in caplog.text
    recording = crosscheck.load(records[0])
    assert recording.mismatches[0].kind == "real"
    assert recording.mismatches[0].reference_agrees_with == "jax"
    assert recording.vllm_token_ids[0, :2].tolist() == [0, 1]
    assert recording.jax_token_ids[0].tolist() == [0, 0, *[-1] * 7]
    assert {"torch", "jax", "fly-jax"} <= recording.about["versions"].keys()


def test_the_counters_are_a_file_that_is_always_whole(vllm, tmp_path, monkeypatch):
    monkeypatch.setattr(counting, "_SECONDS_BETWEEN_WRITES", 0.0)
    module = vllm("replace")
    module.rejection_sample(**undecided_step())
    (path,) = tmp_path.glob("counters-*.json")
    assert json.loads(path.read_text())["steps"] == 1
    assert list(tmp_path.glob("*.tmp")) == []


def test_a_folder_that_cannot_be_written_stops_the_start_and_not_the_service(vllm, tmp_path, caplog):
    module = vllm("crosscheck", variables={"FLY_JAX_VLLM_FOLDER": str(tmp_path / "folder")})
    (tmp_path / "folder").write_text("in the way")
    with pytest.raises(OSError, match="folder"):
        module.rejection_sample(**undecided_step())
    (tmp_path / "folder").unlink()
    module.rejection_sample.fly_jax_session.counters._pid = 0
    module.rejection_sample(**undecided_step())
    shutil.rmtree(tmp_path / "folder")
    (tmp_path / "folder").write_text("in the way")
    module.rejection_sample(**undecided_step())
    assert plugin.counters()["failed_writes"] > 0
    assert caplog.text.count("cannot write") == 1


def test_an_error_in_the_bridge_is_not_swallowed(vllm, monkeypatch):
    def broken(step):
        raise RuntimeError("out of luck")

    monkeypatch.setattr(v1, "verify", broken)
    monkeypatch.setattr(v1, "crossed", broken)
    for mode in settings.MODES:
        module = vllm(mode)
        with pytest.raises(RuntimeError, match="out of luck"):
            module.rejection_sample(**undecided_step())


def sampling_step(**changes):
    """One sampling request of three drafts with p of 0.5 each, and no noise that is near anything."""
    logits = torch.full((3, 4), -torch.inf)
    logits[:, :2] = 0.0
    given = {
        "draft_token_ids": torch.tensor([0, 1, 0]),
        "num_draft_tokens": [3],
        "target_logits": logits,
        "draft_probs": None,
        "bonus_token_ids": torch.tensor([3]),
        "sampling": torch.tensor([True]),
        "uniform": torch.tensor([0.1, 0.2, 0.9], dtype=torch.float64),
        "exponential": torch.tensor([[1.0, 3.0, 1.0, 1.0]]),
    }
    return v1.Step(**{**given, **changes})


def only(step, theirs, ours=None):
    """The class of a step of one request, whose tokens are JAX's own unless given."""
    width = max(step.num_draft_tokens) + 1
    if ours is None:
        ours = v1.emitted(v1.verify(step)[0], 1, width - 1)
    else:
        ours = torch.tensor([ours + [-1] * (width - len(ours))])
    (mismatch,) = crosscheck.classify(step, torch.tensor([theirs + [-1] * (width - len(theirs))]), ours, [0])
    return mismatch


UNDERFLOW = torch.tensor([[0.0, -200.0, -torch.inf], [-torch.inf, -torch.inf, 0.0]])


@pytest.mark.parametrize(
    ("changes", "theirs", "kind", "words"),
    [
        ({}, [0, 1, 0, 3], "real", "within rounding"),
        ({"uniform": torch.tensor([0.1, 0.50001, 0.9], dtype=torch.float64)}, [0, 1, 1], "near_tie", "acceptance at"),
        (
            {"draft_token_ids": torch.tensor([0, 1, 0]), "uniform": torch.tensor([0.1, 0.9, 0.2]).double()}
            | {"config": FlyConfig(1, 0.69314)},
            [0, 0],
            "near_tie",
            "entropy gate at position 1",
        ),
        ({"draft_token_ids": torch.tensor([0, 9, 0])}, [0, 9, 1], "documented", "outside the vocabulary"),
        (
            {"draft_token_ids": torch.tensor([0, -1, 0]), "draft_probs": torch.full((3, 4), 0.25)},
            [0, 3],
            "documented",
            "placeholder",
        ),
        (
            {"draft_token_ids": torch.tensor([0, 2, 0]), "uniform": torch.tensor([0.1, 0.0, 0.2]).double()},
            [0, 2, 0, 3],
            "documented",
            "exactly 0",
        ),
        ({"target_logits": torch.full((3, 4), torch.nan)}, [2], "documented", "not a distribution"),
        (
            {
                "target_logits": UNDERFLOW,
                "draft_token_ids": torch.tensor([1, 2]),
                "num_draft_tokens": [2],
                "uniform": torch.tensor([0.5, 0.5]).double(),
                "exponential": torch.ones(1, 3),
                "config": FlyConfig(1, 0.0),
            },
            [0],
            "documented",
            "underflows",
        ),
    ],
    ids=["real", "acceptance", "gate", "outside", "placeholder", "zero", "nan", "underflow"],
)
def test_mismatches_are_classed(changes, theirs, kind, words):
    mismatch = only(sampling_step(**changes), theirs)
    assert (mismatch.kind, mismatch.reference_agrees_with) == (kind, "jax")
    assert words in mismatch.reason


@pytest.mark.parametrize(
    "changes",
    [
        {"draft_token_ids": torch.tensor([0, 1, -1]), "draft_probs": torch.full((3, 4), 0.25)},
        {"uniform": torch.tensor([0.1, 0.2, 0.0], dtype=torch.float64)},
        {"uniform": torch.tensor([0.1, 0.2, 0.50001], dtype=torch.float64)},
    ],
    ids=["placeholder", "zero", "acceptance"],
)
def test_what_lies_past_the_first_difference_is_no_excuse(changes):
    step = sampling_step(**changes)
    assert only(step, [1]).kind == "real"
    # Nor is anything an excuse for tokens that the reference does not give either.
    assert only(step, [0, 0], ours=[1]).reference_agrees_with == "neither"
    assert only(step, [0, 0], ours=[1]).kind == "real"


def test_only_jax_is_excused_by_the_rule():
    step = sampling_step(draft_token_ids=torch.tensor([0, 9, 0]))
    tokens = crosscheck.reference(step).token_ids
    assert only(step, tokens, ours=[0, 9, 0, 3]).kind == "real"


def test_a_race_for_the_last_token_can_be_near():
    step = sampling_step(
        target_logits=torch.zeros((3, 4)),
        exponential=torch.tensor([[1.0, 2.0, 2.00001, 5.0]]),
        draft_token_ids=torch.tensor([0, 1, 0]),
    )
    mismatch = only(step, [0, 1, 2])
    assert mismatch.kind == "near_tie"
    assert "race" in mismatch.reason


def test_a_greedy_request_is_near_only_at_an_exact_tie():
    logits = torch.tensor([[1.0, 1.0 + 1e-6, 0.0], [0.0, 0.0, 2.0]])
    step = sampling_step(
        draft_token_ids=torch.tensor([0, 2]),
        num_draft_tokens=[2],
        target_logits=logits,
        sampling=None,
        uniform=None,
        exponential=None,
    )
    theirs, ours = torch.tensor([[0, 2, 3]]), torch.tensor([[1, -1, -1]])
    assert crosscheck.classify(step, theirs, ours, [0])[0].kind == "real"
    logits[0, 1] = 1.0  # the reference takes the lower index
    assert crosscheck.classify(step, theirs, ours, [0])[0].kind == "near_tie"


def test_a_recorded_step_is_read_back_whole(tmp_path):
    step = sampling_step(config=FlyConfig(1, 0.5, 2), draft_probs=torch.full((3, 4), 0.25))
    theirs, ours = torch.tensor([[0, 1, 0, 3]]), torch.tensor([[0, 1, 1, -1]])
    mismatches = crosscheck.classify(step, theirs, ours, [0])
    recording = crosscheck.load(crosscheck.save(tmp_path / "new", step, theirs, ours, mismatches))
    assert recording.step.config == step.config
    assert recording.step.num_draft_tokens == [3]
    for name in ("draft_token_ids", "target_logits", "draft_probs", "bonus_token_ids", "uniform", "exponential"):
        assert torch.equal(getattr(recording.step, name), getattr(step, name)), name
    assert recording.mismatches == mismatches


def test_other_files_are_refused(tmp_path):
    text = tmp_path / "text.npz"
    text.write_text("no")
    other = tmp_path / "other.npz"
    np.savez(other, a=np.zeros(2))
    whole = crosscheck.save(tmp_path, sampling_step(), torch.tensor([[0, 1, 0, 3]]), torch.tensor([[0, 1, 1, -1]]), [])
    cut = tmp_path / "cut.npz"
    cut.write_bytes(whole.read_bytes()[:-200])
    shape = tmp_path / "shape.npz"
    with np.load(whole) as file:
        np.savez(shape, **{**dict(file), "jax_token_ids": np.zeros((2, 2), np.int32)})
    pickled = tmp_path / "pickled.npz"
    np.savez(pickled, about=np.array([{}], dtype=object))
    for path in (text, other, pickled, cut, shape):
        with pytest.raises(ValueError, match="is not a step recorded by fly_jax's cross-check"):
            crosscheck.load(path)


def run_cli(*arguments):
    return subprocess.run(
        [sys.executable, "-c", "from fly_jax.cli.app import entry_point; entry_point()", "crosscheck", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "COLUMNS": "160", "JAX_PLATFORMS": "cpu"},
    )


def test_the_command_replays_and_explains(vllm, tmp_path):
    module = vllm("crosscheck")
    module.rejection_sample(**undecided_step())
    (path,) = tmp_path.glob("mismatch-*.npz")
    done = run_cli(str(path))
    assert done.returncode == 1, done.stderr
    for words in ("request 0 (greedy)", "real: no decision", "agrees with jax", "1 of 1 requests differ", "FLy off"):
        assert words in done.stdout
    assert "gives the recorded tokens" in done.stdout
    missing = run_cli(str(tmp_path / "none.npz"))
    assert missing.returncode == 2
    assert missing.stderr.count("\n") == 1


def test_registering_without_being_asked_imports_nothing():
    code = (
        "import sys\n"
        "from importlib.metadata import entry_points\n"
        "(point,) = [each for each in entry_points(group='vllm.general_plugins') if each.name == 'fly_jax']\n"
        "point.load()()\n"
        "assert not {'jax', 'torch', 'vllm'} & sys.modules.keys(), sorted(sys.modules)\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "FLY_JAX_VLLM"}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)


def test_registering_imports_no_jax(tmp_path):
    """vLLM registers in every process of an engine, and only its workers verify."""
    parameters = ", ".join(interface.PARAMETERS_WITHOUT_FLY)
    code = (
        "import sys, types\n"
        "def module(name, **names):\n"
        "    sys.modules[name] = types.ModuleType(name)\n"
        "    sys.modules[name].__dict__.update(names)\n"
        f"def rejection_sample({parameters}): pass\n"
        "class RejectionSampler:\n"
        "    def forward(self): pass\n"
        "module('vllm', __version__='0.32.0')\n"
        "module('vllm.platforms', current_platform=types.SimpleNamespace(is_cpu=lambda: True))\n"
        "module('vllm.triton_utils', HAS_TRITON=False)\n"
        f"module({hooks.V1_MODULE!r}, rejection_sample=rejection_sample, RejectionSampler=RejectionSampler)\n"
        "from fly_jax.bridges.vllm import plugin\n"
        "plugin.register()\n"
        f"assert sys.modules[{hooks.V1_MODULE!r}].rejection_sample.fly_jax_session.original is rejection_sample\n"
        "assert plugin.counters()['steps'] == 0\n"
        "assert 'jax' not in sys.modules\n"
    )
    environment = {**os.environ, "FLY_JAX_VLLM": "crosscheck", "FLY_JAX_VLLM_FOLDER": str(tmp_path)}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)


def test_the_memory_of_a_gpu_is_shared(vllm, monkeypatch, caplog):
    monkeypatch.delenv("XLA_PYTHON_CLIENT_PREALLOCATE")
    vllm("replace")
    assert os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false"
    caplog.clear()
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "true")
    vllm("replace")
    assert "lets JAX take most" in caplog.text
    caplog.clear()
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    monkeypatch.setattr("fly_jax.compat.gpu_is_initialised", lambda: True)
    vllm("replace")
    assert "JAX started before" in caplog.text
