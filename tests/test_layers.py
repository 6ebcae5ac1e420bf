"""What may import what, read from the source: the tables here are the rule, and its documentation.

A module may import its own layer and those above it in `LAYERS`; `NARROWER` takes some of that away again. Imports
inside functions and under TYPE_CHECKING count like any other.
"""

import copy
import graphlib
import subprocess
import sys

import grimp
import pytest

PACKAGE = "fly_jax"

# From the ground up. A name stands for a module or a package with all that is in it; the longest one counts.
LAYERS = (
    ("the ground", ("defaults", "errors", "files", "versions", "compat")),
    ("settings and noise", ("config", "noise")),
    ("kernels", ("kernels",)),
    ("the rule", ("rule",)),
    # Drawing a draft token is public: correct sampling needs it outside of our own decoding, too.
    ("the public API", ("", "verify", "layout", "metrics", "logprobs", "export", "decode.sampling")),
    ("traces", ("traces",)),
    ("the decoder", ("decode.model", "decode.decoder_config", "decode.vocab")),
    ("checkpoints", ("decode.checkpoints",)),
    ("decoding", ("decode",)),
    ("bridges", ("bridges",)),
    ("evaluation", ("evaluation",)),
    ("benchmarks", ("bench",)),
    ("the command line", ("cli",)),
)

# Who alone may import a package, itself aside.
NARROWER = {
    "rule": ("verify", "logprobs", "traces", "decode.sampling"),
    "decode": ("", "evaluation", "bridges.lm_eval", "bench", "cli"),
    "bridges": ("bench.bridge", "cli.crosscheck"),
    "bridges.lm_eval": (),
    "evaluation": ("cli",),
}

# Packages that not every installation has, and who alone may import them.
EXTRAS = {
    "rich": ("cli",),
    "typer": ("cli",),
    "gguf": ("decode.checkpoints",),
    "jinja2": ("decode.checkpoints",),
    "safetensors": ("decode.checkpoints",),
    "tokenizers": ("decode.checkpoints",),
    "flatbuffers": ("export",),
    "torch": ("bridges", "bench.bridge"),
    "vllm": ("bridges.vllm",),
    "lm_eval": ("bridges.lm_eval",),
    "tqdm": ("bridges.lm_eval",),
}


@pytest.fixture(scope="module")
def graph():
    # A cache would be written into the working directory.
    return grimp.build_graph(PACKAGE, include_external_packages=True, cache_dir=None)


def is_in(module, names):
    """Whether a module is one of these, or inside one of them."""
    return any(module == name or (name and module.startswith(f"{name}.")) for name in names)


def imports(graph):
    """Every import by a module of ours, as (importer, imported); our modules without the package's name."""
    return [
        (importer.removeprefix(PACKAGE).removeprefix("."), imported)
        for importer in graph.modules
        if importer.split(".")[0] == PACKAGE
        for imported in graph.find_modules_directly_imported_by(importer)
    ]


def own_imports(graph):
    return [
        (importer, imported.removeprefix(PACKAGE).removeprefix("."))
        for importer, imported in imports(graph)
        if imported.split(".")[0] == PACKAGE
    ]


def layer_of(module):
    """The index of a module's layer: of the longest name in `LAYERS` that it is in."""
    found = [(len(name), i) for i, (_, names) in enumerate(LAYERS) for name in names if is_in(module, (name,))]
    assert found, f"{PACKAGE}.{module} has no layer: add it to LAYERS"
    return max(found)[1]


def wrong_imports(graph):
    """Every import that the tables forbid, in words."""
    wrong = []
    for importer, imported in own_imports(graph):
        lower, upper = LAYERS[layer_of(importer)][0], LAYERS[layer_of(imported)][0]
        if layer_of(importer) < layer_of(imported):
            wrong.append(f"{importer} ({lower}) imports {imported} ({upper})")
        for name, allowed in NARROWER.items():
            if is_in(imported, (name,)) and not is_in(importer, (name, *allowed)):
                wrong.append(
                    f"{importer} imports {imported}, which only {', '.join(filter(None, allowed)) or name} may"
                )
    wrong += [
        f"{importer} imports {imported}, which only {', '.join(EXTRAS[imported])} may"
        for importer, imported in imports(graph)
        if imported in EXTRAS and not is_in(importer, EXTRAS[imported])
    ]
    return sorted(wrong)


def circle(graph):
    """Modules that import each other in a circle, the first one again at the end; empty without one."""
    imported = {}
    for importer, each in own_imports(graph):
        imported.setdefault(importer, set()).add(each)
    try:
        tuple(graphlib.TopologicalSorter(imported).static_order())
    except graphlib.CycleError as error:
        return error.args[1]
    return []


def test_imports_point_one_way(graph):
    assert wrong_imports(graph) == []


def test_no_modules_import_each_other_in_a_circle(graph):
    assert circle(graph) == []


def test_every_module_is_read(graph):
    # The kernels and bridges are links in the package: a reader that does not follow them would find nothing wrong.
    modules = {importer for importer, _ in own_imports(graph)}
    assert {"kernels.api", "bridges.vllm.hooks", "bridges.lm_eval.model", "rule.edge", "cli.app"} <= modules
    for name in (name for _, names in LAYERS for name in names):
        assert any(is_in(module.removeprefix(PACKAGE).removeprefix("."), (name,)) for module in graph.modules), name
    assert set(EXTRAS) <= graph.modules


@pytest.mark.parametrize(
    ("importer", "imported", "words"),
    [
        ("rule.deferral", "fly_jax.decode.model", "rule.deferral (the rule) imports decode.model (the decoder)"),
        ("kernels.xla", "fly_jax.verify", "kernels.xla (kernels) imports verify (the public API)"),
        ("decode.generate", "fly_jax.cli.output", "decode.generate (decoding) imports cli.output (the command line)"),
        ("decode.model", "fly_jax.decode.generate", "decode.model (the decoder) imports decode.generate (decoding)"),
        ("cli.generate", "fly_jax.rule.edge", "cli.generate imports rule.edge, which only verify, logprobs, traces"),
        ("evaluation.run", "fly_jax.bridges.dlpack", "evaluation.run imports bridges.dlpack, which only bench.bridge"),
        ("bridges.vllm.v1", "fly_jax.decode.model", "bridges.vllm.v1 imports decode.model, which only evaluation"),
        ("bench.kernels", "rich", "bench.kernels imports rich, which only cli may"),
    ],
)
def test_a_forbidden_import_is_found(graph, importer, imported, words):
    changed = copy.deepcopy(graph)
    changed.add_import(importer=f"{PACKAGE}.{importer}", imported=imported)
    (found,) = [each for each in wrong_imports(changed) if each.startswith(words)]
    assert found


def test_a_circle_is_found(graph):
    changed = copy.deepcopy(graph)
    changed.add_import(importer=f"{PACKAGE}.evaluation.scorers", imported=f"{PACKAGE}.evaluation.tasks")
    assert set(circle(changed)) == {"evaluation.scorers", "evaluation.tasks"}


@pytest.mark.parametrize("module", ["fly_jax", "fly_jax.cli.app", "fly_jax.cli.output", "fly_jax.decode.checks"])
def test_importing_it_does_not_start_jax(module):
    """`--help` and every process of a vLLM engine import these."""
    code = f"import sys, {module}; raise SystemExit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
