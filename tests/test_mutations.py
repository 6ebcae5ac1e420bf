"""The suite notices deliberate mistakes; the package as it is passes the same tests."""

import mutations
import pytest

pytestmark = pytest.mark.slow


def test_the_unchanged_copy_passes(tmp_path):
    mutations.copy_package(tmp_path)
    assert mutations.run(tmp_path, sorted({mutation.test for mutation in mutations.MUTATIONS})) == 0


@pytest.mark.parametrize("mutation", mutations.MUTATIONS, ids=lambda mutation: mutation.name)
def test_the_mutation_is_caught(mutation, tmp_path):
    mutations.copy_package(tmp_path)
    mutations.apply(mutation, tmp_path)
    assert mutations.run(tmp_path, [mutation.test]) == 1
