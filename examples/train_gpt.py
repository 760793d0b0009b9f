"""Train a byte-level GPT on real text with FlashAttention: one file, to be read from top to bottom.

    python examples/train_gpt.py                     # the source of Python's standard library, a model for this device
    python examples/train_gpt.py --data book.txt --out runs/book
    python examples/train_gpt.py --data book.txt --out runs/book --resume --steps 4000
    python examples/train_gpt.py --mesh data=2,tensor=2,seq=2            # on eight devices; any of the axes will do

On a CPU the default is a small model that trains in a few minutes; on a GPU it has GPT-2 small's shape (12 layers of
width 768, 12 heads, 1024 tokens), computes in bfloat16 and keeps its parameters in float32. Tokens are bytes, so losses
are in nats per byte. In `--out` it leaves log.jsonl (a line for each step), loss.png, sample.txt and checkpoints.

The model is in flax.linen: there parameters and KV cache are plain trees of arrays, so that the whole state of a run is
one tree, which one jitted function takes, donates and returns, and a checkpoint is that tree and nothing else.

A step depends on the state, the seed and its own number only (neither batches nor learning rate depend on `--steps`),
so a run that was stopped and resumed is, bit for bit, the run that never stopped. Ctrl-C saves and stops.

With `--mesh` the devices of this machine share the work, and losses are those of one device but for rounding. "data"
cuts the batch; "tensor" the heads and the MLP's width, with their weights and what the optimiser keeps of these; "seq"
the tokens of each example: attention keeps its queries cut, and gathers keys and values. RULES says where each array
lies; all communication is the compiler's. A run may be resumed on another mesh, and is then the same but for rounding.
"""

import argparse
import contextlib
import functools
import importlib
import json
import logging
import math
import signal
import sys
import sysconfig
import time
import zlib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.linen.spmd import logical_to_mesh_sharding
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from flash_jax.flax.linen import SelfAttention

VOCABULARY = 256  # a token is a byte
CPU = {"layers": 4, "dim": 128, "heads": 4, "length": 128, "batch_size": 16, "steps": 600, "learning_rate": 3e-3}
GPU = {"layers": 12, "dim": 768, "heads": 12, "length": 1024, "batch_size": 32, "steps": 2000, "learning_rate": 6e-4}
# What stays the same when a run is resumed, beside its text.
SETTINGS = ("layers", "dim", "heads", "length", "batch_size", "learning_rate", "dtype", "seed")
# The name of a dim, and the axis of --mesh over which it is cut; SelfAttention names the dims of its own parameters.
RULES = [("batch", "data"), ("length", "seq"), ("heads", "tensor"), ("kv_heads", "tensor"), ("mlp", "tensor")]
# The axes of --mesh, and the setting that the devices along each of them share evenly.
MESH_AXES = {"data": "batch_size", "seq": "length", "tensor": "heads"}
WARMUP_STEPS = 100
VALIDATION_BATCHES = 8
# Dense bfloat16 TFLOP/s by a part of the device's name.
PEAK_TFLOPS = {"B200": 2250, "H200": 989, "H100 PCIe": 756, "H100": 989, "A100": 312, "L40S": 362, "L4": 121}


class UserError(Exception):
    """Something that the user can put right; shown as one line, with exit status 2."""


def first_line(error):
    """What the error says, in one line."""
    return (str(error).strip() or type(error).__name__).partition("\n")[0]


def optional(name, purpose):
    """The module, or None where it is not installed, which is then said."""
    try:
        return importlib.import_module(name)
    except ImportError:
        print(f"{name.partition('.')[0]} is not installed: {purpose} (pip install 'flash-jax[examples]')")
        return None


class GPT(nn.Module):
    """Bytes [B, T] to float32 logits [B, T, 256]: at each place, of the byte that comes next."""

    layers: int
    dim: int
    heads: int
    dtype: str
    attention: str | None
    decode: bool = False

    @nn.compact
    def __call__(self, tokens):
        """The logits; with `decode` the tokens continue those in the KV cache."""

        def dense(width, *names):
            init = nn.with_logical_partitioning(nn.initializers.lecun_normal(), names)
            return nn.Dense(width, use_bias=False, dtype=self.dtype, kernel_init=init)

        normalised = functools.partial(nn.RMSNorm, dtype=self.dtype)
        # A product instead of nn.Embed, whose gradient is a scatter: on a GPU that takes as long as all the rest, in an
        # order that differs from run to run.
        init = nn.initializers.normal(0.02)
        embed = nn.Dense(self.dim, use_bias=False, dtype=self.dtype, kernel_init=init, name="embedding")
        x = embed(jax.nn.one_hot(tokens, VOCABULARY))
        for _ in range(self.layers):
            options = {"dtype": self.dtype, "implementation": self.attention, "decode": self.decode}
            x = x + SelfAttention(self.heads, **options)(normalised()(x))
            # Flax numbers layers as they are made, and checkpoints name them so.
            narrow, wide = dense(self.dim, "mlp", "embed"), dense(4 * self.dim, "embed", "mlp")
            x = x + narrow(nn.gelu(wide(normalised()(x))))
        return nn.Dense(VOCABULARY, use_bias=False)(normalised()(x).astype(jnp.float32))


def read_text(data):
    """(training bytes, validation bytes) of a file, a folder, or the standard library where `data` is None.

    Of a folder every twentieth file, in the order of their paths, is for validation; of few files the last twentieth.
    """
    root = Path(data or sysconfig.get_path("stdlib"))
    if not root.exists():
        raise UserError(f"--data: {root} does not exist")
    skipped = set() if data else {"site-packages", "dist-packages", "test", "tests", "idle_test"}
    files = [root] if root.is_file() else sorted(root.rglob("*" if data else "*.py"), key=lambda file: file.as_posix())
    inside = [(file, file.relative_to(root).parts) for file in files if file.is_file()]
    kept = [file for file, names in inside if skipped.isdisjoint(names) and not any(n.startswith(".") for n in names)]
    texts = [np.frombuffer(file.read_bytes(), np.uint8) for file in kept]
    if len(texts) >= 20:
        return np.concatenate([t for i, t in enumerate(texts) if i % 20 != 19]), np.concatenate(texts[19::20])
    text = np.concatenate([np.empty(0, np.uint8), *texts])
    return np.split(text, [len(text) * 19 // 20])


def windows(text, starts, args):
    """[number of starts, length + 1] bytes of the text: the tokens, and one more for the last to foretell."""
    return text[starts[:, None] + np.arange(args.length + 1)]


def training_batch(text, step, args):
    """The windows of this step: a pure function of text, seed and step."""
    random = np.random.default_rng([args.seed, step])
    return windows(text, random.integers(len(text) - args.length, size=args.batch_size), args)


def make_optimizer(peak):
    """AdamW on clipped gradients, its rate rising linearly, then falling as 1 / sqrt(step), whenever the run ends."""

    def learning_rate(step):
        progress = (step + 1) / WARMUP_STEPS
        return peak * jnp.minimum(progress, jax.lax.rsqrt(progress))

    def matrices(params):
        return jax.tree.map(lambda p: p.ndim > 1, params)

    adamw = optax.adamw(learning_rate, b1=0.9, b2=0.95, weight_decay=0.1, mask=matrices)
    return optax.chain(optax.clip_by_global_norm(1.0), adamw)


def make_mesh(sizes):
    """A mesh of devices with these axes; None, for one device, without any."""
    if not sizes:
        return None
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def shardings(names, mesh):
    """How arrays lie on the mesh, by RULES: a tree of shardings for a tree of the names of dims, `P("batch", ...)`."""
    if mesh is None:
        return None
    return logical_to_mesh_sharding(names, mesh, [rule for rule in RULES if rule[1] in mesh.axis_names])


def initial_state(model, optimizer, seed, mesh=None):
    """The tree that a run is made of: parameters, optimiser state, and the number of steps taken."""

    def named(key):  # each parameter, and what the optimiser keeps of it, boxed with the names of its dims
        params = model.init(key, jnp.zeros((1, 1), jnp.int32))["params"]
        return {"params": params, "opt_state": optimizer.init(params), "step": jnp.zeros((), jnp.int32)}

    key = jax.random.key(seed)
    names = nn.get_partition_spec(jax.eval_shape(named, key))
    return jax.jit(lambda key: nn.unbox(named(key)), out_shardings=shardings(names, mesh))(key)


def mean_loss(params, batch, model, mesh=None):
    """Cross entropy in nats per byte of batch [B, T + 1]."""
    tokens = batch.astype(jnp.int32)
    seen = tokens[:, :-1]
    if mesh is not None:  # whatever is computed from the tokens then lies as they do
        seen = jax.lax.with_sharding_constraint(seen, shardings(P("batch", "length"), mesh))
    logits = model.apply({"params": params}, seen)
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]))


def train_step(state, batch, model, optimizer, mesh=None):
    """(the next state, the loss before it)."""
    loss, gradients = jax.value_and_grad(mean_loss)(state["params"], batch, model, mesh)
    updates, opt_state = optimizer.update(gradients, state["opt_state"], state["params"])
    params = optax.apply_updates(state["params"], updates)
    return {"params": params, "opt_state": opt_state, "step": state["step"] + 1}, loss


def compiled(model, optimizer, state, args, mesh=None):
    """(train step, validation loss), compiled for their one shape: nothing is traced once training runs."""
    batch = jax.ShapeDtypeStruct((args.batch_size, args.length + 1), jnp.uint8, sharding=shardings(P("batch"), mesh))
    stays = None if mesh is None else (jax.tree.map(lambda x: x.sharding, state), shardings(P(), mesh))
    step = functools.partial(train_step, model=model, optimizer=optimizer, mesh=mesh)
    step = jax.jit(step, donate_argnums=0, out_shardings=stays)
    validation_loss = jax.jit(functools.partial(mean_loss, model=model, mesh=mesh))
    return step.lower(state, batch).compile(), validation_loss.lower(state["params"], batch).compile()


def train(state, programs, texts, args, out):
    """Takes the steps from the state's to args.steps; returns the last state. `programs` are those of `compiled`."""
    step, validation_loss = programs
    starts = np.linspace(0, len(texts[1]) - args.length - 1, VALIDATION_BATCHES * args.batch_size, dtype=int)
    validation = np.split(windows(texts[1], starts, args), VALIDATION_BATCHES)  # the same each time
    first = int(state["step"])
    progress = Progress(first, optax.tree.size(state["params"]), args)
    with first_interrupt() as interrupt, progress.bar or contextlib.nullcontext():
        running = None  # the step whose losses are still being computed: they are read once the next one is under way
        for number in range(first + 1, args.steps + 1):
            state, loss = step(state, training_batch(texts[0], number, args))
            due = number % args.eval_every == 0 or number == args.steps
            val_losses = [validation_loss(state["params"], batch) for batch in validation] if due else []
            if running:
                out.log(progress.report(*running))
            running = number, loss, val_losses
            if due or interrupt:
                out.log(progress.report(*running))
                running = None
                out.save(state)
            if interrupt:
                break
    return state


@contextlib.contextmanager
def first_interrupt():
    """Yields a list that the first Ctrl-C fills, so that the step in hand is finished; a second one acts at once."""
    came = []

    def note(*_):
        came.append(True)
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield came
    finally:
        signal.signal(signal.SIGINT, before)


class Progress:
    """A bar with loss, tokens/s and, on GPUs whose peak is known, model FLOPs utilisation (MFU), of all devices."""

    def __init__(self, first, weights, args):
        kind = jax.devices()[0].device_kind if args.dtype == "bfloat16" else ""
        devices = math.prod(args.mesh.values())
        self.peak = next((devices * 1e12 * tflops for name, tflops in PEAK_TFLOPS.items() if name in kind), None)
        # Products of the forward and backward pass: 6 per weight, and attention as in the FlashAttention-2 paper.
        self.flops_per_token = 6 * weights + 12 * args.layers * args.dim * args.length
        self.tokens, self.clock = args.batch_size * args.length, time.perf_counter()
        tqdm = optional("tqdm", "no progress bar")
        self.bar = tqdm and tqdm.tqdm(total=args.steps, initial=first, unit="step", disable=None)

    def report(self, number, loss, val_losses):
        """Shows what one step gave, and returns it for the log; waits for the step where it is still running."""
        record = {"step": number, "loss": float(loss)}
        if val_losses:
            record["val_loss"] = float(np.mean(val_losses))
        began, self.clock = self.clock, time.perf_counter()
        speed = record["tokens_per_second"] = self.tokens / (self.clock - began)
        text = f"loss {record['loss']:.3f}  {speed:,.0f} tokens/s"
        if self.peak:
            text += f"  {speed * self.flops_per_token / self.peak:.0%} MFU"
        if self.bar:
            self.bar.set_postfix_str(text, refresh=False)
            self.bar.update()
        if val_losses:
            (self.bar.write if self.bar else print)(
                f"step {number:>6}  {text}  validation {record['val_loss']:.4f} nats/byte"
            )
        return record


class Output:
    """The folder of a run: its settings, log, checkpoints and loss curve."""

    def __init__(self, args, texts):
        self.path = Path(args.out).absolute()
        self.settings = {name: getattr(args, name) for name in SETTINGS}
        self.settings["data"] = zlib.crc32(texts[1], zlib.crc32(texts[0]))
        self.log_path, self.settings_path = self.path / "log.jsonl", self.path / "settings.json"
        if self.log_path.exists() != args.resume:
            found = "no run to resume" if args.resume else "a run already: add --resume, or name another folder"
            raise UserError(f"--out: {args.out} holds {found}")
        self.path.mkdir(parents=True, exist_ok=True)
        if not args.resume:
            self.settings_path.write_text(json.dumps(self.settings))
        logging.getLogger("absl").setLevel(logging.CRITICAL)  # there Orbax reports at length what it then raises
        if orbax := optional("orbax.checkpoint", "no checkpoints"):
            options = orbax.CheckpointManagerOptions(max_to_keep=2)
            self.manager = orbax.CheckpointManager(self.path / "checkpoints", options=options)
        self.orbax = orbax

    def log(self, record):
        """Appends a line to the log."""
        with self.log_path.open("a") as file:
            file.write(json.dumps(record) + "\n")

    def save(self, state):
        """Starts to write a checkpoint; training goes on meanwhile."""
        if self.orbax:
            self.manager.save(int(state["step"]), args=self.orbax.args.StandardSave(state))

    def resumed(self, state):
        """The state of the last checkpoint, in the place of the fresh `state`; the log is cut back to it."""
        last = self.orbax and self.manager.latest_step()
        if last is None:
            raise UserError(f"--resume: there is no checkpoint in {self.path}: start anew in another folder")
        try:
            started = json.loads(self.settings_path.read_text())
            differ = [name for name, value in self.settings.items() if value != started[name]]
            shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
            state = None if differ else self.manager.restore(last, args=self.orbax.args.StandardRestore(shapes))
            lines = self.log_path.read_text().splitlines(keepends=True)
            log = [line for line in lines if json.loads(line)["step"] <= last]
        except Exception as error:  # a damaged file can fail anywhere in it
            raise UserError(f"--resume: cannot read {self.path}/checkpoints/{last}: {first_line(error)}") from error
        if differ:
            raise UserError(f"--resume: the run in {self.path} was started with another {', '.join(differ)}")
        self.log_path.write_text("".join(log))
        return state

    def draw(self):
        """Saves the loss curve as loss.png."""
        if figures := optional("matplotlib.figure", "no loss curve"):
            records = [json.loads(line) for line in self.log_path.read_text().splitlines()]
            axes = figures.Figure(layout="constrained").subplots()
            for name, style in (("loss", "-"), ("val_loss", "o-")):
                points = [(record["step"], record[name]) for record in records if name in record]
                axes.plot(*np.reshape(points, (-1, 2)).T, style, linewidth=0.7, label=name)
            axes.set(xlabel="step", ylabel="loss, nats/byte")
            axes.legend()
            axes.figure.savefig(self.path / "loss.png", dpi=150)


def sample(params, model, prompt, length, seed, temperature=0.8):
    """The prompt's bytes [P] continued to `length` bytes, each new one by one pass over the KV cache."""
    model = model.clone(decode=True)
    key = jax.random.key(seed)
    cache = jax.eval_shape(model.init, key, jax.ShapeDtypeStruct((1, length), jnp.int32))["cache"]

    @jax.jit
    def generate(params, prompt, keys):
        def feed(cache, tokens):
            logits, state = model.apply({"params": params, "cache": cache}, tokens, mutable=["cache"])
            return state["cache"], logits[:, -1]

        def one(carry, key):
            cache, logits = carry
            token = jax.random.categorical(key, logits / temperature)
            return feed(cache, token[:, None]), token[0]

        empty = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), cache)
        return jax.lax.scan(one, feed(empty, prompt), keys)[1]

    new = generate(params, prompt[None].astype(jnp.int32), jax.random.split(key, length - len(prompt)))
    return prompt.tobytes() + np.asarray(new, np.uint8).tobytes()


def mesh_sizes(text):
    """{axis: devices} of "data=2,tensor=4", in the order of MESH_AXES and without axes of one device."""
    sizes = {}
    for part in text.split(","):
        axis, _, number = part.partition("=")
        if axis not in MESH_AXES:
            raise argparse.ArgumentTypeError(f"the axes are {', '.join(MESH_AXES)}; got {axis!r}")
        if axis in sizes:
            raise argparse.ArgumentTypeError(f"{axis} is given twice")
        if not number.isdecimal() or not int(number):
            raise argparse.ArgumentTypeError(f"{axis} must be a positive number of devices; got {number!r}")
        sizes[axis] = int(number)
    return {axis: sizes[axis] for axis in MESH_AXES if sizes.get(axis, 1) > 1}


def parse(argv):
    """The flags, with the defaults that suit the device; flags that cannot be right end the program with one line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.error = lambda message: parser.exit(2, f"train_gpt: error: {message}\n")
    on_gpu = jax.default_backend() == "gpu"
    parser.add_argument("--data", help="a file or folder to train on; Python's standard library without it")
    parser.add_argument("--out", help="folder of the run; without it a new one, runs/gpt-DATE-TIME")
    parser.add_argument("--resume", action="store_true", help="continue the run in --out from its last checkpoint")
    parser.add_argument(
        "--mesh", type=mesh_sizes, default={}, help="such as data=2,seq=2,tensor=2; default: one device"
    )
    parser.add_argument("--attention", choices=["auto", "triton", "xla", "reference"], default="auto")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16" if on_gpu else "float32")
    parser.add_argument("--seed", type=int, default=0, help="of parameters, batches and sample; default: 0")
    sizes = (GPU if on_gpu else CPU) | {"eval_every": 200}
    for name, value in sizes.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value, help=f"default: {value}")
    args = parser.parse_args(argv)
    for name in sizes:
        if getattr(args, name) <= 0:
            parser.error(f"--{name.replace('_', '-')} must be above 0; got {getattr(args, name)}")
    if math.prod(args.mesh.values()) > jax.device_count():
        parser.error(f"--mesh asks for {math.prod(args.mesh.values())} devices; there are {jax.device_count()}")
    for axis, size in args.mesh.items():
        if getattr(args, name := MESH_AXES[axis]) % size:
            flag = f"--{name.replace('_', '-')}"
            parser.error(f"{flag} must be divisible by {axis} of --mesh; got {getattr(args, name)} and {size}")
    if args.seed < 0:
        parser.error(f"--seed must not be negative; got {args.seed}")
    if args.dim % (2 * args.heads):
        parser.error(f"--dim must be an even multiple of --heads; got {args.dim} and {args.heads}")
    if args.resume and not args.out:
        parser.error("--resume needs --out, the folder of the run to continue")
    args.out = args.out or time.strftime("runs/gpt-%Y%m%d-%H%M%S")
    return args


def run(argv):
    """The whole program."""
    args = parse(argv)
    texts = read_text(args.data)
    if min(map(len, texts)) <= args.length:
        raise UserError(f"--data: {len(texts[1])} bytes are left for validation, too few for --length {args.length}")
    out = Output(args, texts)
    attention = None if args.attention == "auto" else args.attention
    model = GPT(args.layers, args.dim, args.heads, args.dtype, attention)
    optimizer = make_optimizer(args.learning_rate)
    mesh = make_mesh(args.mesh)
    state = initial_state(model, optimizer, args.seed, mesh)
    if args.resume:
        state = out.resumed(state)
        if int(state["step"]) >= args.steps:
            raise UserError(f"--steps: the run in {args.out} has taken {int(state['step'])} steps already")
    weights, size = optax.tree.size(state["params"]) / 1e6, sum(map(len, texts)) / 1e6
    print(f"{weights:.1f}M weights, {size:.1f} MB of text, run in {args.out}; compiling")
    state = train(state, compiled(model, optimizer, state, args, mesh), texts, args, out)
    out.draw()
    if int(state["step"]) < args.steps:
        print(f"stopped after step {state['step']}")
    else:
        text = sample(state["params"], model, texts[1][: 1 + args.length // 4], args.length, args.seed)
        (out.path / "sample.txt").write_bytes(text)
        print(f"a sample:\n{text.decode(errors='replace')}")
    if out.orbax:
        out.manager.close()  # waits for the last checkpoint


def main(argv=None):
    """Runs the program; returns its exit status, 2 with one line on stderr where the user can put something right."""
    sys.stdout.reconfigure(line_buffering=True)  # lines appear at once, also in a pipe
    try:
        run(argv)
    except (UserError, OSError, NotImplementedError) as error:  # the last for an --attention that cannot run here
        reason = first_line(error)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        reason = "out of memory; use a smaller --batch-size or --length"
    except KeyboardInterrupt:
        return 130
    else:
        return 0
    print(f"train_gpt: error: {reason}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
