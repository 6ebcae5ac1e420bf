"""What `import fly_jax` offers."""

import ast
from importlib.metadata import version
from pathlib import Path

import fly_jax


def test_what_type_checkers_see_is_what_is_looked_up_on_first_use():
    tree = ast.parse(Path(fly_jax.__file__).read_text())
    imports = [
        node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module.startswith("fly_jax.")
    ]
    seen = {name.asname: node.module.removeprefix("fly_jax.") for node in imports for name in node.names}
    assert seen == fly_jax._MODULES


def test_every_exported_name_is_there():
    assert {name: getattr(fly_jax, name) for name in fly_jax.__all__}.keys() <= set(dir(fly_jax))
    assert fly_jax.__version__ == version("fly-jax")
