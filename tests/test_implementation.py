"""Which implementation runs, what a named one says where it cannot, and what interpret mode does (R17)."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flash_jax
from tests.support import gpu_compile
from tests.support.cases import case
from tests.support.structure import named

ARRAYS = case("B2-T19-S23-H4-K2-D8-f32").arrays()


def on_cpu(**options):
    """The text of a call lowered for a CPU."""
    return jax.jit(functools.partial(flash_jax.flash_attention, causal=True, **options)).lower(*ARRAYS).as_text()


def on_gpu(**options):
    """The text of a call lowered for a GPU, which need not be on this machine."""
    return gpu_compile.lower(functools.partial(flash_jax.flash_attention, causal=True, **options), *ARRAYS).as_text()


def test_none_is_xla_on_a_cpu():
    assert on_cpu() == on_cpu(implementation="xla")
    out = flash_jax.flash_attention(*ARRAYS, causal=True)
    np.testing.assert_array_equal(out, flash_jax.flash_attention(*ARRAYS, causal=True, implementation="xla"))


def test_none_is_triton_for_an_nvidia_gpu():
    """Decided for the platform that the program is lowered for, not for the machine on which it is traced."""
    assert "xla.gpu.triton" in on_gpu() and "xla.gpu.triton" in on_gpu(implementation="triton")


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_a_named_one_is_kept_on_a_gpu(implementation):
    assert "triton" not in on_gpu(implementation=implementation)


def test_none_serves_what_triton_cannot():
    """Head dims beyond its largest, lowered for a GPU: `xla`, forward and backward alike."""
    arrays = case("T8-H1-D300-f32").arrays()
    gradient = jax.grad(lambda *x: flash_jax.flash_attention(*x).sum(), argnums=(0, 1, 2))
    assert "triton" not in gpu_compile.lower(gradient, *arrays).as_text()


def test_reference_is_served_by_the_public_function():
    out, lse = flash_jax.flash_attention(*ARRAYS, causal=True, return_lse=True, implementation="reference")
    assert out.shape == ARRAYS[0].shape and lse.shape == (2, 4, 19)
    call = functools.partial(flash_jax.flash_attention, implementation="reference")
    assert not named("flash_attention_forward", call, *ARRAYS)


def test_triton_on_a_cpu_names_the_reason_and_what_works():
    call = functools.partial(flash_jax.flash_attention, implementation="triton")
    assert jax.eval_shape(call, *ARRAYS).shape == ARRAYS[0].shape  # what the platform decides is not raised by tracing
    with pytest.raises(NotImplementedError) as error:
        jax.jit(call).lower(*ARRAYS)
    assert str(error.value) == (
        "implementation='triton' cannot serve this call: it needs an NVIDIA GPU, and this program is lowered for "
        "another platform. Use implementation='xla' or None (or wrap the call in `flash_jax.interpret_mode()` to test "
        "the kernel)."
    )
    with pytest.raises(NotImplementedError, match="needs an NVIDIA GPU"):
        call(*ARRAYS)


def test_triton_refuses_wide_heads_while_tracing():
    arrays = [jax.ShapeDtypeStruct((8, 1, 300), jnp.bfloat16)] * 3
    with pytest.raises(
        NotImplementedError, match=r"takes head dims up to 256, and these are 300 and 300.*'xla' or None"
    ):
        jax.eval_shape(functools.partial(flash_jax.flash_attention, implementation="triton"), *arrays)


def test_mosaic_gpu_is_not_there_yet():
    with pytest.raises(
        NotImplementedError, match=r"implementation='mosaic_gpu' cannot serve this call: .*Use implementation="
    ):
        jax.eval_shape(functools.partial(flash_jax.flash_attention, implementation="mosaic_gpu"), *ARRAYS)


def test_mosaic_gpu_names_a_choice_that_works():
    """Where Triton could not serve the call either, it is not what the message proposes."""
    arrays = [jax.ShapeDtypeStruct((8, 1, 300), jnp.bfloat16)] * 3
    with pytest.raises(NotImplementedError, match=r"Use implementation='xla' or None"):
        jax.eval_shape(functools.partial(flash_jax.flash_attention, implementation="mosaic_gpu"), *arrays)


@pytest.mark.parametrize("name", ["cudnn", "Triton", "", 3, True])
def test_an_unknown_name_is_refused(name):
    with pytest.raises(
        ValueError, match="`implementation` must be None or one of 'triton', 'mosaic_gpu', 'xla', 'reference'"
    ):
        flash_jax.flash_attention(*ARRAYS, implementation=name)


# Interpret mode.


def runs_interpreted(function, *arguments):
    """Whether each forward pass traced in `function` is in interpret mode."""
    anew = functools.partial(function)  # JAX remembers what it has traced by the function's identity
    return [e.params["spec"].interpret for e in named("flash_attention_forward", anew, *arguments)]


TRITON = functools.partial(flash_jax.flash_attention, implementation="triton")


def test_interpret_mode_runs_the_kernel_on_the_cpu():
    with flash_jax.interpret_mode():
        assert runs_interpreted(TRITON, *ARRAYS) == [True]
        out = TRITON(*ARRAYS)
    np.testing.assert_array_equal(out.shape, ARRAYS[0].shape)


def test_interpret_mode_ends_with_its_block_even_by_an_error():
    with pytest.raises(KeyError), flash_jax.interpret_mode(), flash_jax.interpret_mode():
        raise KeyError
    assert runs_interpreted(TRITON, *ARRAYS) == [False]
    with pytest.raises(NotImplementedError, match="needs an NVIDIA GPU"):
        TRITON(*ARRAYS)


def test_what_was_traced_inside_keeps_the_mode():
    with flash_jax.interpret_mode():
        traced = jax.jit(TRITON).trace(*ARRAYS)
        inside = TRITON(*ARRAYS)
    np.testing.assert_array_equal(traced.lower().compile()(*ARRAYS), inside)


def test_gradient_taken_inside_keeps_the_mode():
    """The backward pass, bound when the forward is differentiated, inherits it."""
    with flash_jax.interpret_mode():
        _, pull = jax.vjp(TRITON, *ARRAYS)
    assert all(np.isfinite(g).all() for g in pull(np.ones_like(ARRAYS[0])))


def test_calls_inside_and_outside_do_not_share_a_compiled_function():
    with flash_jax.interpret_mode():
        TRITON(*ARRAYS)
    with pytest.raises(NotImplementedError, match="needs an NVIDIA GPU"):
        TRITON(*ARRAYS)


def test_interpret_mode_leaves_other_implementations_alone():
    expected = flash_jax.flash_attention(*ARRAYS)
    with flash_jax.interpret_mode():
        for implementation in (None, "xla"):
            np.testing.assert_array_equal(flash_jax.flash_attention(*ARRAYS, implementation=implementation), expected)
        assert "triton" not in on_cpu()


# Compiling.


@pytest.fixture
def compilations():
    """A list that grows by one with each program that JAX compiles."""
    found = []

    def listen(event, seconds, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            found.append(seconds)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield found
    jax.monitoring.unregister_event_duration_listener(listen)


def test_the_same_call_is_compiled_once(attend, compilations):
    """Outside `jit`, too: a second call with the same shapes compiles nothing (case G10)."""
    q, k, v = map(jnp.asarray, case("B1-T21-S23-H2-D8-f32").arrays())
    pull = jax.grad(lambda q: attend(q, k, v).sum())
    run = lambda: (attend(q, k, v), pull(q))  # noqa: E731
    run()
    before = len(compilations)
    assert before > 0
    run()
    attend(k, q, q)
    run()
    assert len(compilations) - before == 1  # of the call with the shapes exchanged


def test_the_program_does_not_grow_with_the_length():
    """Loops are not unrolled: 64 times the tokens lower to the same number of lines (case G10)."""

    def lines(length):
        x = jax.ShapeDtypeStruct((1, length, 2, 16), jnp.float32)
        gradient = jax.grad(lambda *y: flash_jax.flash_attention(*y, causal=True).sum(), argnums=(0, 1, 2))
        return len(jax.jit(gradient).lower(x, x, x).as_text().splitlines())

    assert lines(1024 * 64) == lines(1024 * 2)
