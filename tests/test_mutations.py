"""The suite notices deliberate mistakes; the package as it is passes the same tests."""

import mutations
import pytest


@pytest.mark.parametrize("mutation", mutations.MUTATIONS, ids=lambda mutation: mutation.name)
def test_the_mutation_applies(mutation):
    source = (mutations.ROOT / "fly_jax" / mutation.file).read_text()
    assert source.count(mutation.old) == 1
    assert (mutations.ROOT / "tests" / mutation.test.split("::")[0]).is_file()


@pytest.mark.slow
def test_the_unchanged_copy_passes(tmp_path):
    mutations.copy_package(tmp_path)
    assert mutations.run(tmp_path, sorted({mutation.test for mutation in mutations.MUTATIONS})) == 0


@pytest.mark.slow
@pytest.mark.parametrize("mutation", mutations.MUTATIONS, ids=lambda mutation: mutation.name)
def test_the_mutation_is_caught(mutation, tmp_path):
    mutations.copy_package(tmp_path)
    mutations.apply(mutation, tmp_path)
    assert mutations.run(tmp_path, [mutation.test]) == 1
