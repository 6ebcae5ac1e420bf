import contextlib
import gc
import math
import re
import types

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import on_gpu
import pytest

torch = pytest.importorskip("torch")

from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

from fly_jax.bridges import dlpack  # noqa: E402

pytestmark = pytest.mark.torch

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.bool, torch.int32, torch.int8, torch.int16]
DTYPES += [torch.uint8, torch.uint16, torch.uint32]


def numbers(*shape, dtype=torch.float32):
    return torch.arange(math.prod(shape)).reshape(shape).to(dtype)


def misaligned(count, dtype=torch.float32):
    return numbers(count + 1, dtype=dtype)[1:]


def inference():
    with torch.inference_mode():
        return numbers(4, 64)


def read_only():
    buffer = np.arange(96, dtype=np.float32)
    start = -(buffer.ctypes.data // 4) % 16
    values = buffer[start : start + 64]
    values.flags.writeable = False
    with pytest.warns(UserWarning, match="not writable"):
        return torch.from_numpy(values)


def assert_same(array, tensor):
    """Values, shape and dtype, compared as bits."""
    assert isinstance(array, jax.Array)
    assert str(array.dtype) == str(tensor.dtype).removeprefix("torch.")
    assert array.shape == tuple(tensor.shape)
    assert array.devices() == {jax.devices("cpu")[0]}
    assert np.asarray(array).tolist() == tensor.tolist()
    # What is compiled reads it the same.
    assert np.asarray(jax.jit(lambda x: x.reshape(-1)[::-1])(array)).tolist() == tensor.reshape(-1).tolist()[::-1]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_to_jax_shares_aligned_contiguous_memory(dtype):
    tensor = numbers(3, 5, dtype=dtype)
    array = dlpack.to_jax(tensor)
    assert_same(array, tensor)
    assert dlpack.shares_memory(tensor, array)


ZERO_COPY = {
    "rows of a batch": lambda: numbers(4, 64)[1:3],
    "scalar": lambda: torch.tensor(3.0),
    "one row of odd stride": lambda: torch.as_strided(numbers(100), (1, 4), (77, 1)),
    "expanded to its own shape": lambda: numbers(1).expand(1, 1),
    "requires_grad": lambda: numbers(4, 64).requires_grad_(),
    "parameter": lambda: torch.nn.Parameter(numbers(4, 64)),
    "result of a graph": lambda: numbers(4, 64).requires_grad_() * 2,
    "inference": inference,
    "read-only": read_only,
}
ONE_COPY = {
    "transposed": lambda: numbers(4, 64).T,
    "sliced columns": lambda: numbers(4, 64)[:, 1:],
    "strided": lambda: numbers(4, 64)[::2, ::3],
    "expanded": lambda: numbers(4, 1).expand(4, 5),
    "diagonal": lambda: numbers(8, 8).diagonal(),
    "permuted": lambda: numbers(2, 3, 4).permute(2, 0, 1),
    "channels last": lambda: numbers(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "misaligned": lambda: misaligned(64),
    "misaligned bytes": lambda: misaligned(64, torch.int8),
    "misaligned and strided": lambda: misaligned(64)[::2],
    "negated view": lambda: torch._neg_view(numbers(4, 64)),
    "imaginary part of a conjugate": lambda: torch.complex(numbers(64), numbers(64) + 1).conj().imag,
    "inference, transposed": lambda: inference().T,
    "requires_grad, transposed": lambda: numbers(4, 64).requires_grad_().T,
}


@pytest.mark.parametrize("make", ZERO_COPY.values(), ids=ZERO_COPY.keys())
def test_to_jax_without_a_copy(make):
    tensor = make()
    array = dlpack.to_jax(tensor)
    assert_same(array, tensor)
    assert dlpack.shares_memory(tensor, array)


@pytest.mark.parametrize("make", ONE_COPY.values(), ids=ONE_COPY.keys())
def test_to_jax_with_a_copy(make):
    tensor = make()
    before = tensor.tolist()
    array = dlpack.to_jax(tensor)
    assert_same(array, tensor)
    assert not dlpack.shares_memory(tensor, array)
    # All bytes 1: whoever shares them sees it, whatever the view.
    tensor.untyped_storage().fill_(1)
    assert tensor.tolist() != before
    assert np.asarray(array).tolist() == before


def test_a_copy_is_made_before_to_jax_returns():
    for _ in range(20):
        tensor = misaligned(1 << 20)
        array = dlpack.to_jax(tensor)
        tensor.zero_()
        assert array[-1] == 1 << 20
        assert array[0] == 1


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0)], ids=str)
@pytest.mark.parametrize("dtype", [*DTYPES, torch.int64, torch.float64], ids=str)
def test_empty(shape, dtype):
    tensor = torch.zeros(shape, dtype=dtype)
    array = dlpack.to_jax(tensor)
    narrowed = {torch.int64: "int32", torch.float64: "float32"}
    assert (array.shape, str(array.dtype)) == (shape, narrowed.get(dtype, str(dtype).removeprefix("torch.")))
    assert not dlpack.shares_memory(tensor, array)
    for copy in (True, False):
        back = dlpack.to_torch(array, copy=copy)
        assert back.shape == shape
        assert not dlpack.shares_memory(back, array)


def test_a_shared_array_outlives_its_tensor():
    tensor = numbers(1000)
    array = dlpack.to_jax(tensor)
    del tensor
    gc.collect()
    others = [torch.zeros(1000) for _ in range(10)]
    assert np.asarray(array).tolist() == list(range(1000))
    assert len(others) == 10


def test_a_shared_array_sees_writes_and_a_clone_does_not():
    tensor = numbers(64)
    shared, own = dlpack.to_jax(tensor), dlpack.to_jax(tensor.clone())
    tensor[3] = -1
    assert (shared[3], own[3]) == (-1, 3)


def test_to_jax_ignores_the_default_device():
    with jax.default_device(jax.devices("cpu")[1]):
        for tensor in (numbers(64), misaligned(64), numbers(64, dtype=torch.int64)):
            assert dlpack.to_jax(tensor).devices() == {jax.devices("cpu")[0]}


def test_to_jax_copies_pinned_memory(monkeypatch):
    # DLPack says that it is a GPU's, which JAX may not have.
    tensor = numbers(64)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda self: self.data_ptr() == tensor.data_ptr())
    array = dlpack.to_jax(tensor)
    assert_same(array, tensor)
    assert not dlpack.shares_memory(tensor, array)


LOW, HIGH = -(2**31), 2**31 - 1


@pytest.mark.parametrize("values", [[LOW, 0, HIGH], [[5, 6], [7, 8]], -1], ids=str)
def test_int64_in_range_becomes_int32(values):
    tensor = torch.tensor(values, dtype=torch.int64)
    for given in (tensor, tensor.unsqueeze(-1).expand(*tensor.shape, 3), tensor.T if tensor.ndim == 2 else tensor):
        array = dlpack.to_jax(given)
        assert_same(array, given.to(torch.int32))
        assert not dlpack.shares_memory(given, array)


@pytest.mark.parametrize("value", [LOW - 1, HIGH + 1, 2**40, 2**32 + 5, 2**63 - 1, -(2**63)])
def test_int64_out_of_range(value):
    with pytest.raises(ValueError, match=rf"^ids must be in \[{LOW}, {HIGH}\].* got {value};.*jax_enable_x64"):
        dlpack.to_jax(torch.tensor([0, 3, value, 1]), name="ids")


def test_uint64():
    inside = torch.tensor([0, HIGH], dtype=torch.uint64)
    assert_same(dlpack.to_jax(inside), inside.to(torch.int32))
    for value in (HIGH + 1, 2**63 - 1, 2**63, 2**64 - 1):
        with pytest.raises(ValueError, match=f"^seed must be .* got {value};"):
            dlpack.to_jax(torch.tensor([1, value], dtype=torch.uint64), name="seed")
    with jax.enable_x64(True):
        largest = torch.tensor([2**64 - 1], dtype=torch.uint64)
        assert_same(dlpack.to_jax(largest), largest)


def test_float64_exact_or_an_error():
    tensor = torch.tensor([0.5, -0.0, math.inf, -math.inf, 2.0**-149, 3.0], dtype=torch.float64)
    assert_same(dlpack.to_jax(tensor), tensor.float())
    assert math.copysign(1, dlpack.to_jax(tensor)[1]) == -1
    assert jnp.isnan(dlpack.to_jax(torch.tensor(math.nan, dtype=torch.float64)))
    for value in (0.1, 1e300, 1e-300, 1 + 2.0**-52):
        with pytest.raises(
            ValueError, match=rf"^u must hold float32 .* got the float64 {re.escape(repr(value))}; .*round_up=True"
        ):
            dlpack.to_jax(torch.tensor([math.nan, 0.5, value], dtype=torch.float64), name="u")


def test_float64_rounded_up():
    tensor = torch.tensor([[0.1, 0.5], [1.0, 1 - 2.0**-53]], dtype=torch.float64)
    array = dlpack.to_jax(tensor.T, round_up=True)
    assert_same(array, dlpack.round_up(tensor).T)
    assert not dlpack.shares_memory(tensor, array)
    single = numbers(64)
    assert dlpack.shares_memory(single, dlpack.to_jax(single, round_up=True))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor([2**40, -(2**63), 2**63 - 1]),
        torch.tensor([0.1, math.nextafter(1, 2)], dtype=torch.float64),
        torch.tensor([2**31]).expand(4),
    ],
    ids=["int64", "float64", "expanded"],
)
@pytest.mark.parametrize("round_up", [False, True])
def test_x64_passes_64_bits_unchanged(tensor, round_up):
    with jax.enable_x64(True):
        array = dlpack.to_jax(tensor, round_up=round_up)
        assert_same(array, tensor)
        assert dlpack.shares_memory(tensor, array) == tensor.is_contiguous()
        assert dlpack.to_torch(array).tolist() == tensor.tolist()
        assert dlpack.to_torch(array).dtype == tensor.dtype


def neighbours(value):
    """float64 values around a float32: itself, one float64 and one float32 step either way, and half a step."""
    single = np.float32(value)
    steps = [np.float64(np.nextafter(single, np.float32(end))) for end in (-np.inf, np.inf)]
    exact = float(single)
    nearby = [math.nextafter(exact, -math.inf), exact, math.nextafter(exact, math.inf)]
    return [*nearby, *steps, *((exact + step) / 2 for step in steps)]


singles = st.one_of(st.floats(0, 1, width=32), st.sampled_from([0.0, 1.0, 2.0**-149, 2.0**-126, 1 - 2.0**-24]))


@hypothesis.given(
    ratios=st.lists(singles, min_size=1, max_size=5), uniforms=st.lists(st.floats(0, 1), min_size=1, max_size=5)
)
def test_round_up_changes_no_decision(ratios, uniforms):
    near = [value for ratio in ratios for value in neighbours(ratio)]
    uniform = torch.tensor([*uniforms, *near, 0.0, 1.0], dtype=torch.float64)
    ratio = torch.tensor([*ratios, 0.0, 1.0], dtype=torch.float32)[:, None]
    rounded = dlpack.round_up(uniform)
    assert rounded.dtype == torch.float32
    assert torch.equal(ratio.double() >= uniform, ratio >= rounded)
    assert (rounded.double() >= uniform).all()
    # The next one, not a later one.
    assert (torch.nextafter(rounded, torch.tensor(-math.inf)).double() < uniform).all()


def test_round_up_at_the_ends():
    tensor = torch.tensor([0.0, 1.0, 1e-300, 1 - 2.0**-53, 1e300, -1e300, math.inf, -math.inf], dtype=torch.float64)
    expected = [0.0, 1.0, 2.0**-149, 1.0, math.inf, -float(np.finfo(np.float32).max), math.inf, -math.inf]
    assert dlpack.round_up(tensor).tolist() == expected
    assert dlpack.round_up(torch.tensor([math.nan], dtype=torch.float64)).isnan().all()
    single = numbers(3)
    assert dlpack.round_up(single) is single
    with pytest.raises(TypeError, match=r"float64 or float32, got torch\.float16"):
        dlpack.round_up(single.half())


NOT_DENSE = {
    "sparse": (lambda: torch.eye(3).to_sparse(), r"dense .* got torch\.sparse_coo; .*to_dense"),
    "mkldnn": (lambda: torch.eye(3).to_mkldnn(), r"dense .* got torch\._mkldnn"),
    "nested": (
        lambda: torch.nested.nested_tensor([numbers(2), numbers(3)], layout=torch.jagged),
        "dense .* got nested",
    ),
    "complex": (lambda: torch.zeros(3, dtype=torch.complex64), r"bfloat16.*got torch\.complex64"),
    "float8": (lambda: torch.zeros(3).to(torch.float8_e4m3fn), r"got torch\.float8_e4m3fn; .*float\(\)"),
    "ndarray": (lambda: np.zeros(3), r"torch\.Tensor, got ndarray; .*as_tensor\(logits\)"),
    "array": (lambda: jnp.zeros(3), r"torch\.Tensor, got ArrayImpl"),
    "None": (lambda: None, r"torch\.Tensor, got NoneType"),
}


@pytest.mark.parametrize(("make", "message"), NOT_DENSE.values(), ids=NOT_DENSE.keys())
def test_to_jax_of_what_cannot_cross(make, message):
    with pytest.raises(TypeError, match=f"^logits must be (a )?.*{message}"):
        dlpack.to_jax(make(), name="logits")


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
def test_to_jax_of_a_quantised_tensor():
    quantised = torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.quint8)
    with pytest.raises(TypeError, match=r"^logits must be .* got torch\.quint8; .*dequantize"):
        dlpack.to_jax(quantised, name="logits")


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor:UserWarning")
def test_to_jax_of_a_tensor_without_memory():
    freed = numbers(4)
    freed.untyped_storage().resize_(0)
    with FakeTensorMode():
        fake = torch.zeros(4)
    for tensor in (torch.zeros(4, device="meta"), freed, fake):
        with pytest.raises(ValueError, match=r"^logits must have memory of its own, got a "):
            dlpack.to_jax(tensor, name="logits")
    with pytest.raises(ValueError, match=r"^logits must have memory"):
        torch.func.vmap(lambda row: dlpack.to_jax(row, name="logits"))(numbers(3, 4))


@pytest.mark.parametrize("device", ["xpu", "mps"])
def test_to_jax_from_a_device_that_jax_never_has(device):
    with FakeTensorMode():
        tensor = torch.zeros(4, device=device)
    with pytest.raises(RuntimeError, match=rf"^logits is on torch device {device}.*allowed are cpu.*logits\.cpu\(\)"):
        dlpack.to_jax(tensor, name="logits")


@pytest.mark.parametrize(("hip", "platform"), [(None, "cuda"), ("7.0", "rocm")])
def test_to_jax_from_a_gpu_without_its_jax_backend(monkeypatch, hip, platform):
    monkeypatch.setattr(torch.version, "hip", hip)
    with FakeTensorMode():
        tensor = torch.zeros(4, device="cuda:1")
    with pytest.raises(
        RuntimeError, match=rf"^logits is on torch device cuda:1, but JAX has nothing .*'{platform}'.*jax\[{platform}\]"
    ):
        dlpack.to_jax(tensor, name="logits")


def test_to_jax_from_a_gpu_that_jax_does_not_see(monkeypatch):
    seen = types.SimpleNamespace(local_hardware_id=0)
    monkeypatch.setattr(jax, "local_devices", lambda *, backend: [seen])
    with FakeTensorMode():
        tensor = torch.zeros(4, device="cuda:1")
    with pytest.raises(RuntimeError, match=r"^logits is on torch device cuda:1, but JAX has .*local_hardware_id=0"):
        dlpack.to_jax(tensor, name="logits")


def test_to_jax_without_a_cpu_backend(monkeypatch):
    def no_backend(*, backend):
        raise RuntimeError(f"Unknown backend {backend}")

    monkeypatch.setattr(jax, "local_devices", no_backend)
    with pytest.raises(RuntimeError, match=r"^tensor is on torch device cpu, but JAX has nothing.*JAX_PLATFORMS"):
        dlpack.to_jax(numbers(4))


ARRAY_DTYPES = [str(dtype).removeprefix("torch.") for dtype in DTYPES]


@pytest.mark.parametrize("dtype", ARRAY_DTYPES)
@pytest.mark.parametrize("copy", [True, False], ids=["copy", "alias"])
def test_to_torch(dtype, copy):
    array = jnp.arange(15).reshape(3, 5).astype(dtype)
    tensor = dlpack.to_torch(array, copy=copy)
    assert_same(array, tensor)
    assert tensor.is_contiguous()
    assert dlpack.shares_memory(tensor, array) == (not copy)


def test_to_torch_is_safe_from_later_writes():
    array = jnp.arange(64.0) + 1
    before = np.array(array)
    dlpack.to_torch(array).zero_()
    assert np.array_equal(np.asarray(array), before)
    alias = dlpack.to_torch(array, copy=False)
    alias[0] = -1
    assert array[0] == -1


def test_to_torch_is_safe_from_donation():
    array = jnp.arange(64.0) + 1
    tensor = dlpack.to_torch(array)
    jax.jit(lambda x: x * 0, donate_argnums=0)(array).block_until_ready()
    assert array.is_deleted()
    assert tensor.tolist() == [value + 1 for value in range(64)]


@pytest.mark.parametrize("copy", [True, False], ids=["copy", "alias"])
def test_to_torch_waits_for_the_array(copy):
    square = jax.jit(lambda x: jax.lax.fori_loop(0, 20, lambda _, y: y @ y, x)[0, 0])
    square(jnp.eye(300)).block_until_ready()
    for _ in range(5):
        assert dlpack.to_torch(square(jnp.eye(300)), copy=copy) == 1


@pytest.mark.parametrize("copy", [True, False], ids=["copy", "alias"])
def test_to_torch_blocks_before_it_exports(monkeypatch, copy):
    # jaxlib happens to wait too, which DLPack does not promise on a CPU.
    array, calls = jnp.arange(4.0), []

    def record(method):
        original = getattr(type(array), method)

        def recorded(self, **options):
            calls.append(method)
            return original(self, **options)

        monkeypatch.setattr(type(array), method, recorded)

    record("block_until_ready")
    record("__dlpack__")
    dlpack.to_torch(array, copy=copy)
    assert calls == ["block_until_ready", "__dlpack__"]


def test_an_alias_outlives_its_array():
    array = jnp.arange(1000.0) + 1
    tensor = dlpack.to_torch(array, copy=False)
    del array
    gc.collect()
    others = [jnp.zeros(1000) for _ in range(10)]
    assert tensor.tolist() == [value + 1 for value in range(1000)]
    assert len(others) == 10


def test_to_torch_makes_a_row_major_copy_of_another_layout():
    tensor = numbers(4, 64)
    array = jax.dlpack.from_dlpack(tensor.T)
    assert dlpack.shares_memory(tensor, array)
    copy = dlpack.to_torch(array)
    assert copy.is_contiguous()
    assert torch.equal(copy, tensor.T)
    assert torch.equal(dlpack.to_torch(array, copy=False), tensor.T)


def test_to_torch_from_another_cpu_device():
    array = jax.device_put(jnp.arange(64.0), jax.devices("cpu")[1])
    tensor = dlpack.to_torch(array)
    assert tensor.tolist() == list(range(64))
    assert tensor.device.type == "cpu"


def test_there_and_back():
    tensor = numbers(4, 64)
    array = dlpack.to_jax(tensor)
    assert dlpack.to_torch(array, copy=False).data_ptr() == tensor.data_ptr()
    assert torch.equal(dlpack.to_torch(array), tensor)


def test_to_torch_in_inference_mode():
    with torch.inference_mode():
        tensor = dlpack.to_torch(jnp.arange(4.0))
        assert tensor.is_inference()
    assert tensor.tolist() == [0, 1, 2, 3]


NOT_ARRAYS = {
    "ndarray": (lambda: np.zeros(3), r"jax\.Array, got ndarray; pass jnp\.asarray"),
    "tensor": (lambda: torch.zeros(3), r"jax\.Array, got Tensor"),
    "keys": (lambda: jax.random.key(0), r"got key<.*jax\.random\.key_data"),
    "complex": (lambda: jnp.zeros(3, jnp.complex64), "got complex64; convert"),
    "int4": (lambda: jnp.zeros(3, jnp.int4), "got int4; convert"),
    "float8": (lambda: jnp.zeros(3, jnp.float8_e5m2), "got float8_e5m2; convert"),
}


@pytest.mark.parametrize(("make", "message"), NOT_ARRAYS.values(), ids=NOT_ARRAYS.keys())
def test_to_torch_of_what_cannot_cross(make, message):
    with pytest.raises(TypeError, match=f"^array must be .*{message}"):
        dlpack.to_torch(make())
    with pytest.raises(TypeError, match=r"^array must be "):
        dlpack.shares_memory(torch.zeros(3), make())


def test_to_torch_of_a_tracer():
    for transform in (jax.jit, jax.vmap):
        with pytest.raises(TypeError, match=r"^array must have values, got the tracer .*outside"):
            transform(dlpack.to_torch)(jnp.zeros(3))


def test_to_torch_of_a_deleted_array():
    array = jnp.zeros(3) + 1
    array.delete()
    with pytest.raises(ValueError, match=r"^array float32\[3\] was deleted or donated"):
        dlpack.to_torch(array)


@pytest.mark.parametrize("spec", [("x",), ()], ids=["sharded", "replicated"])
def test_to_torch_from_several_devices(spec):
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices("cpu")[:2])
    array = jax.device_put(jnp.arange(4.0), jax.NamedSharding(mesh, jax.P(*spec)))
    with pytest.raises(ValueError, match=r"^array must be on one device, got 2 .*device_put"):
        dlpack.to_torch(array)
    assert dlpack.to_torch(jax.device_put(array, jax.devices("cpu")[0])).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_to_torch_from_a_device_that_torch_lacks(monkeypatch, platform):
    if torch.cuda.is_available():
        pytest.skip("torch has a GPU here")
    array = jnp.zeros(3)
    monkeypatch.setattr(type(array), "devices", lambda self: [types.SimpleNamespace(platform=platform)])
    with pytest.raises(RuntimeError, match=rf"^array is on .*{platform}.*which torch .* cannot use.*device_put"):
        dlpack.to_torch(array)


def test_shares_memory_is_about_the_same_start():
    tensor = numbers(4, 64)
    array = dlpack.to_jax(tensor)
    assert dlpack.shares_memory(tensor, array)
    assert dlpack.shares_memory(tensor.T, array)
    assert not dlpack.shares_memory(tensor[1:], array)
    assert not dlpack.shares_memory(tensor.clone(), array)
    assert not dlpack.shares_memory(tensor[:0], array)


@pytest.mark.parametrize("make", [lambda: numbers(64), lambda: misaligned(64), lambda: numbers(64).long()])
def test_to_jax_asks_the_tensor_itself(monkeypatch, make):
    # Given the consumer's stream, `__dlpack__` makes it wait for torch's current one; a capsule would not.
    tensor, calls = make(), []
    original = torch.Tensor.__dlpack__

    def recorded(self, **options):
        calls.append(options)
        return original(self, **options)

    monkeypatch.setattr(torch.Tensor, "__dlpack__", recorded)
    monkeypatch.setattr(torch.utils.dlpack, "to_dlpack", None)
    assert dlpack.to_jax(tensor).shape == (64,)
    assert len(calls) == 1
    assert "stream" in calls[0]


@pytest.mark.gpu
def test_streams_of_a_gpu():
    """A rehearsal has no streams, on the CPU, but all the rest."""
    size, device, platform = (64, "cpu", "cpu") if on_gpu.IS_REHEARSAL else (4096, "cuda", "gpu")
    with contextlib.nullcontext() if on_gpu.IS_REHEARSAL else torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(10):
            busy = torch.eye(size, device=device)
            for _ in range(20):
                busy = busy @ busy
            array = dlpack.to_jax(busy)
            assert dlpack.shares_memory(busy, array)
            assert [each.platform for each in array.devices()] == [platform]
            back = dlpack.to_torch(jax.jit(lambda x: x * 2)(array))
            assert back.device.type == device
            assert torch.equal(back, 2 * torch.eye(size, device=device))
