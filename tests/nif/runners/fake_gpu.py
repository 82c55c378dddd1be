"""A GPU that computes nothing and knows who waits for whom: the runners' own code runs over it and races are found.

Tensors on it have shapes and no content. Every operation is put on the stream that is current, as torch would, and
takes a vector clock: what of every stream it comes after. Two uses of the same bytes, one of them writing, of which
neither comes after the other, are a race. Memory is handed out as torch's allocator does it: what is freed belongs to
the stream it was allocated on, and the next allocation there gets it at once, whatever is still to run there.

    gpu = FakeGpu()
    with gpu.active():
        runner = TritonRunner(gpu.model(config), ...)     # a Race is raised where one is
    gpu.operations                                        # what was launched, with the bytes of its arguments
"""

import contextlib
import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from transformers import AutoModelForCausalLM, LlamaForCausalLM  # before torch.cuda's classes are replaced
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from tests.nif.kernels.offline_compiler import variant_of

assert LlamaForCausalLM
CUDA = torch.device("cuda", 1)  # not the one that a thread begins with, so that a missing guard is found
_GRANULE = 512  # bytes, as torch's allocator rounds
_HOST = -1
Clock = dict[int, int]

# What kernels write, by the names of their parameters; everything else is read.
_WRITTEN = {
    "_linear_kernel": {"out_ptr", "out_sums_ptr", "key_ptr", "value_ptr"},
    "_embed_kernel": {"out_ptr", "sums_ptr"},
    "_plan_kernel": {"owners_ptr", "firsts_ptr"},
    "_chunk_attention_kernel": {"out_ptr"},
    "_decode_attention_kernel": {"out_ptr", "partial_ptr", "stats_ptr"},
    "_join_shares_kernel": {"out_ptr"},
    "_unpack_kernel": {"out_ptr"},
    "_packed_linear_kernel": {"out_ptr"},
    "_join_splits_kernel": {"out_ptr"},
    "_rope_cache_kernel": {"query_ptr", "key_ptr", "value_ptr"},
    "_write_kv_kernel": {"key_cache_ptr", "value_cache_ptr"},
    "_add_rms_norm_kernel": {"out_ptr", "residual_ptr"},
    "_silu_mul_kernel": {"out_ptr"},
    "_copy_blocks_kernel": {"pool_ptr"},
    "_next_tokens_kernel": {"out_ptr"},
    "_edit_kernel": {"logits_ptr"},
    "_gather_logprobs_kernel": {"out_ptr"},
    "_shrink_kernel": {"h_ptr"},
    "_expand_kernel": {"out_ptr"},
    "_survey_kernel": {"bests_ptr", "tokens_ptr"},
    "_weigh_kernel": {"masses_ptr", "counts_ptr"},
    "_gather_kernel": {"near_ptr", "ids_ptr"},
    "_sample_kernel": {"tokens_ptr"},
}


class Race(AssertionError):
    """Two uses of the same memory that nothing orders."""


class WrongDevice(AssertionError):
    """Something that goes to the current device would go to another one."""


class WaitsForDevice(AssertionError):
    """The host waits for the device where it must not."""


@dataclass(eq=False)
class Memory:
    """A piece of the device's (or pinned) memory, and the latest of its uses by each stream."""

    size: int
    number: int
    uses: dict[tuple[int, bool, int, int], tuple[int, str]] = field(default_factory=dict)


class Allocation:
    """A tensor's claim on memory; when the last view is gone, the memory is free."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory


@dataclass(frozen=True)
class Use:
    """Bytes [begin, end) of a piece of memory."""

    memory: Memory
    begin: int
    end: int
    writes: bool


@dataclass(frozen=True)
class Operation:
    """Something launched: its name, its stream, and what it may touch."""

    name: str
    stream: int
    arguments: tuple[tuple[str, tuple[int, ...], int, bool], ...]  # name, shape, bytes, whether written


class OnGpu(torch.Tensor):
    """A tensor without content that says it is on the GPU."""

    meta: torch.Tensor
    allocation: Allocation

    @staticmethod
    def __new__(cls, meta: torch.Tensor, allocation: Allocation) -> "OnGpu":
        made: OnGpu = torch.Tensor._make_subclass(cls, meta, False, dispatch_device=True, device_for_backend_keys=CUDA)
        made.meta = meta
        made.allocation = allocation
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:
            return CUDA
        raise AssertionError(f"{func} outside the fake GPU")


def join(into: Clock, other: Clock) -> Clock:
    for stream, tick in other.items():
        if into.get(stream, 0) < tick:
            into[stream] = tick
    return into


class FakeStream:
    """Stands for torch.cuda.Stream."""

    device = CUDA

    def __init__(self, gpu: "FakeGpu") -> None:
        self.gpu = gpu
        self.number = next(gpu.numbers)
        self.clock: Clock = {}

    def wait_stream(self, other: "FakeStream") -> None:
        join(self.clock, other.clock)

    def wait_event(self, event: "FakeEvent") -> None:
        join(self.clock, event.clock)

    def synchronize(self) -> None:
        self.gpu.wait(self.clock)

    def query(self) -> bool:
        return all(self.gpu.host.get(stream, 0) >= tick for stream, tick in self.clock.items())


class FakeEvent:
    """Stands for torch.cuda.Event."""

    def __init__(self, gpu: "FakeGpu") -> None:
        self.gpu = gpu
        self.clock: Clock = {}

    def record(self, stream: FakeStream | None = None) -> None:
        if stream is None:
            self.gpu.check_current("an event")
        self.clock = dict((stream or self.gpu.current).clock)

    def elapsed_time(self, later: "FakeEvent") -> float:
        """As many milliseconds as operations were launched on the current stream."""
        number = self.gpu.current.number
        return float(later.clock.get(number, 0) - self.clock.get(number, 0))

    def synchronize(self) -> None:
        self.gpu.wait(self.clock)

    def query(self) -> bool:
        return all(self.gpu.host.get(stream, 0) >= tick for stream, tick in self.clock.items())


class FakeGraph:
    """Stands for torch.cuda.CUDAGraph: a replay touches what the captured operations touched."""

    def __init__(self, gpu: "FakeGpu") -> None:
        self.gpu = gpu
        self.captured: list[tuple[str, list[Use], tuple[Any, ...]]] = []

    def replay(self) -> None:
        assert self.captured, "nothing was captured"
        for name, uses, arguments in self.captured:
            self.gpu.run(f"replayed {name}", uses, arguments)


class FakeGpu:
    """The device, its streams and its memory; see the module's words."""

    def __init__(self, num_processors: int = 132) -> None:
        self.numbers = itertools.count()
        self.host: Clock = {_HOST: 0}  # what the host knows to be over
        self.default = FakeStream(self)
        self.current = self.default
        self.streams = weakref.WeakSet([self.default])
        self.num_streams = 1  # that were ever made
        self.operations: list[Operation] = []
        self.variants: set[str] = set()  # of kernels, where Triton does not interpret
        self.allocated = self.peak = 0
        self._num_processors = num_processors
        self._free: dict[object, list[Memory]] = {}
        self._memories = itertools.count()
        self._pinned: dict[int, tuple[Memory, int]] = {}  # address -> memory, bytes
        self._capturing: FakeGraph | None = None
        self._pool: object = None
        self._device = 0  # the thread's current one

    # The current device

    @contextlib.contextmanager
    def _on_device(self, device: torch.device) -> Iterator[None]:
        before, self._device = self._device, device.index
        try:
            yield
        finally:
            self._device = before

    def check_current(self, what: str) -> None:
        """Raises WrongDevice unless this is the current device."""
        if self._device != CUDA.index:
            raise WrongDevice(f"{what} goes to cuda:{self._device}, which is current, and not to {CUDA}")

    # Order

    def wait(self, clock: Clock) -> None:
        """The host waits until all of the clock is over."""
        assert self._capturing is None, "the host waits within a capture"
        join(self.host, clock)

    def run(self, name: str, uses: Sequence[Use], arguments: tuple[Any, ...] = ()) -> None:
        """Puts an operation on the current stream."""
        if self._capturing is not None:
            self._capturing.captured.append((name, list(uses), arguments))
            return
        stream = self.current
        join(stream.clock, self.host)
        stream.clock[stream.number] = stream.clock.get(stream.number, 0) + 1
        self.operations.append(Operation(name, stream.number, arguments))
        self._note(name, uses, stream.clock, stream.number)

    def on_host(self, name: str, uses: Sequence[Use]) -> None:
        """The host itself touches pinned memory."""
        self.host[_HOST] += 1
        self._note(name, uses, self.host, _HOST)

    def _note(self, name: str, uses: Sequence[Use], clock: Clock, by: int) -> None:
        for use in uses:
            for (stream, wrote, begin, end), (tick, what) in use.memory.uses.items():
                overlaps = begin < use.end and use.begin < end
                if overlaps and (wrote or use.writes) and clock.get(stream, 0) < tick:
                    kinds = ("write" if use.writes else "read", "write" if wrote else "read")
                    raise Race(
                        f"{name} ({kinds[0]} on stream {by}) is not ordered after {what} ({kinds[1]} on {stream}): "
                        f"it waits for {clock.get(stream, 0)} of that stream's operations, which was number {tick}; "
                        f"memory {use.memory.number}, bytes {use.begin} to {use.end}"
                    )
        for use in uses:
            use.memory.uses[by, use.writes, use.begin, use.end] = (clock[by], name)

    # Memory

    def allocate(self, nbytes: int) -> Allocation:
        """Memory for the current stream, the latest freed first."""
        key = self._pool if self._capturing is not None else self.current.number
        size = max(1, -(-nbytes // _GRANULE)) * _GRANULE
        free = self._free.setdefault(key, [])
        fitting = [memory for memory in free if memory.size >= size]
        if fitting:
            memory = fitting[-1]
            free.remove(memory)
        else:
            memory = Memory(size, next(self._memories))
        self.allocated += memory.size
        self.peak = max(self.peak, self.allocated)
        allocation = Allocation(memory)
        weakref.finalize(allocation, self._give_back, free, memory)
        return allocation

    def _give_back(self, free: list[Memory], memory: Memory) -> None:
        self.allocated -= memory.size
        free.append(memory)

    def pin(self, tensor: torch.Tensor) -> None:
        """Notes a host tensor as pinned, so that who touches it when is known."""
        self._pinned[tensor.data_ptr()] = (Memory(tensor.nbytes, next(self._memories)), max(1, tensor.nbytes))
        weakref.finalize(tensor.untyped_storage(), self._pinned.pop, tensor.data_ptr(), None)

    def use(self, tensor: torch.Tensor, *, writes: bool) -> Use | None:
        """A tensor's bytes; None for plain memory of the host."""
        if isinstance(tensor, OnGpu):
            if tensor.numel() == 0:
                return None
            item, meta = tensor.dtype.itemsize, tensor.meta
            reach = sum((size - 1) * stride for size, stride in zip(meta.shape, meta.stride(), strict=True))
            begin = meta.storage_offset() * item
            return Use(tensor.allocation.memory, begin, begin + (reach + 1) * item, writes)
        if type(tensor) is torch.Tensor and tensor.device.type == "cpu" and tensor.numel():
            at = tensor.data_ptr()
            for base, (memory, size) in self._pinned.items():
                if base <= at < base + size:
                    return Use(memory, at - base, at - base + tensor.nbytes, writes)
        return None

    def on_gpu(self, shape: Sequence[int], dtype: torch.dtype) -> OnGpu:
        """A tensor that was there before anything else."""
        meta = torch.empty(tuple(shape), dtype=dtype, device="meta")
        return OnGpu(meta, self.allocate(meta.nbytes))

    def model(self, config: Any, *, dtype: torch.dtype = torch.float16) -> Any:
        """A model of this configuration, all of its weights on the GPU and none of them anything."""
        from genbatch.nif.cuda_device import Device
        from genbatch.nif.models.architectures import layer_groups
        from genbatch.nif.models.loaded_model import Model
        from genbatch.nif.runner import LayerShape
        from genbatch.nif.runners.torch_runner import ATTENTION_NAME, register_attention

        register_attention()
        with torch.device("meta"):
            hf = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=ATTENTION_NAME)
        hf.eval().requires_grad_(False)
        made: dict[int, torch.nn.Parameter] = {}
        for module in hf.modules():
            for name, part in [*module._parameters.items()]:
                if part is not None:
                    if id(part) not in made:
                        made[id(part)] = torch.nn.Parameter(self.on_gpu(part.shape, part.dtype), requires_grad=False)
                    module._parameters[name] = made[id(part)]
            for name, part in [*module._buffers.items()]:
                if part is not None:
                    module._buffers[name] = self.on_gpu(part.shape, part.dtype)
        head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        shape = LayerShape(config.num_key_value_heads, head, head)
        unused: Any = None
        return Model(
            name="fake",
            hf=hf,
            config=config,
            tokenizer=unused,
            dtype=str(dtype).removeprefix("torch."),
            device=Device(CUDA.type, CUDA.index),
            groups=layer_groups("fake", config),
            layers=(shape,) * config.num_hidden_layers,
            vocab_size=config.vocab_size,
            eos_token_ids=frozenset(),
            max_position=config.max_position_embeddings,
        )

    # Standing for torch.cuda and for Triton

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """While open, torch's CUDA device is this one."""
        functions: dict[str, Any] = {
            "Stream": lambda *_: self._new_stream(),
            "Event": lambda *_, **__: FakeEvent(self),
            "current_stream": lambda *_: self.current,
            "stream": self._on_stream,
            "device": self._on_device,
            "device_count": lambda: 2,
            "CUDAGraph": lambda: FakeGraph(self),
            "graph": self._capture,
            "graph_pool_handle": object,
            "synchronize": lambda *_: self._synchronize(),
            "get_device_properties": lambda *_: SimpleNamespace(
                multi_processor_count=self._num_processors, shared_memory_per_multiprocessor=228 * 1024
            ),
            "is_available": lambda: True,
            "_lazy_init": lambda: None,
        }
        with contextlib.ExitStack() as stack:
            for name, value in functions.items():
                stack.enter_context(mock.patch.object(torch.cuda, name, value))
            for kind in (InterpretedFunction, JITFunction):
                stack.enter_context(mock.patch.object(kind, "run", _launcher(self)))
            stack.enter_context(_Methods(self))
            stack.enter_context(_Operations(self))
            yield

    def _new_stream(self) -> FakeStream:
        stream = FakeStream(self)
        self.streams.add(stream)
        self.num_streams += 1
        return stream

    @contextlib.contextmanager
    def _on_stream(self, stream: FakeStream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            with self._on_device(CUDA):  # as torch does
                yield
        finally:
            self.current = before

    @contextlib.contextmanager
    def _capture(self, graph: FakeGraph, pool: object, stream: FakeStream, capture_error_mode: str) -> Iterator[None]:
        assert capture_error_mode == "thread_local", "another thread's allocation ends the capture"
        self._synchronize()
        with self._on_stream(stream):
            self._capturing, self._pool = graph, pool
            try:
                yield
            finally:
                self._capturing, self._pool = None, None

    def _synchronize(self) -> None:
        for stream in list(self.streams):
            self.wait(stream.clock)


def _launcher(gpu: FakeGpu) -> Callable[..., None]:
    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        name = kernel.fn.__name__
        gpu.check_current(name)
        names = list(kernel.arg_names)
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        written = _WRITTEN.get(name)
        assert written is not None, f"what does {name} write? tell _WRITTEN"
        uses, arguments = [], []
        for parameter, value in given.items():
            if isinstance(value, torch.Tensor):
                assert isinstance(value, OnGpu), f"{name} is given {parameter} on the host"
                use = gpu.use(value, writes=parameter in written)
                if use is not None:
                    uses.append(use)
                arguments.append((parameter, tuple(value.shape), value.nbytes, parameter in written))
        if isinstance(kernel, JITFunction):
            gpu.variants.add(variant_of(kernel, args, kwargs)[0])
        gpu.run(name, uses, tuple(arguments))

    return run


class _Methods(TorchFunctionMode):
    """What reads a tensor without an operation of torch's."""

    def __init__(self, gpu: FakeGpu) -> None:
        super().__init__()
        self._gpu = gpu

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.tensor and (kwargs or {}).get("pin_memory"):
            made = torch.tensor(*args, **{**kwargs, "pin_memory": False})
            self._gpu.pin(made)
            return made
        if args and isinstance(args[0], torch.Tensor):
            tensor = args[0]
            if func in (torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.item):
                if isinstance(tensor, OnGpu):
                    raise WaitsForDevice(f"{func.__name__} of a tensor on the GPU")
                use = self._gpu.use(tensor, writes=False)
                if use is not None:
                    self._gpu.on_host(func.__name__, [use])
            if isinstance(tensor, OnGpu):
                # Indexing in C++ asks for a guard of the device, which a torch without CUDA has not.
                if func is torch.Tensor.__getitem__:
                    return _item(tensor, args[1])
                if func is torch.Tensor.__setitem__:
                    value = args[2] if isinstance(args[2], torch.Tensor) else torch.tensor(args[2])
                    torch.ops.aten.index_put_(tensor, _indices(args[1]), value)
                    return None
                if func is torch.Tensor.contiguous:
                    return (
                        tensor
                        if tensor.meta.is_contiguous()
                        else torch.ops.aten.clone(tensor, memory_format=torch.contiguous_format)
                    )
                if func is torch.Tensor.copy_:
                    return torch.ops.aten.copy_(tensor, args[1], (kwargs or {}).get("non_blocking", False))
                if func is torch.Tensor.data_ptr:
                    return _address(tensor)
                if func is torch.Tensor.untyped_storage:
                    return SimpleNamespace(data_ptr=lambda: tensor.allocation.memory.number << 48)
        return func(*args, **(kwargs or {}))


def _indices(index: Any) -> list[torch.Tensor]:
    parts = index if isinstance(index, tuple) else (index,)
    assert all(isinstance(part, torch.Tensor) for part in parts), "indices and slices mixed"
    return list(parts)


def _item(tensor: OnGpu, index: Any) -> torch.Tensor:
    parts = index if isinstance(index, tuple) else (index,)
    if any(isinstance(part, torch.Tensor) for part in parts):
        return torch.ops.aten.index(tensor, _indices(index))
    return OnGpu(tensor.meta[index], tensor.allocation)


def _address(tensor: OnGpu) -> int:
    return (tensor.allocation.memory.number << 48) + tensor.meta.storage_offset() * tensor.dtype.itemsize


class _Operations(TorchDispatchMode):
    """Every operation of torch's that touches the GPU or pinned memory."""

    def __init__(self, gpu: FakeGpu) -> None:
        super().__init__()
        self._gpu = gpu

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:
            return CUDA if isinstance(args[0], OnGpu) else args[0].device
        gpu, kwargs = self._gpu, dict(kwargs or {})
        pinned = bool(kwargs.pop("pin_memory", False))
        tensors: list[torch.Tensor] = []
        tree_map(lambda part: tensors.append(part) if isinstance(part, torch.Tensor) else None, (args, kwargs))
        device = kwargs.get("device")
        to_gpu = device is not None and torch.device(device).type == "cuda"
        if not to_gpu and not any(isinstance(tensor, OnGpu) for tensor in tensors):
            result = func(*args, **kwargs)
            uses = self._uses(func, args, kwargs)
            if uses and not _is_view(func):
                gpu.on_host(str(func), uses)
            if pinned:
                gpu.pin(result)
            return result
        return self._on_gpu(func, args, kwargs, to_gpu)

    def _on_gpu(self, func: Any, args: Any, kwargs: dict[str, Any], to_gpu: bool) -> Any:
        gpu, name = self._gpu, str(func)
        if func is torch.ops.aten._local_scalar_dense.default:
            raise WaitsForDevice("a number of a tensor on the GPU")
        if func.overloadpacket is torch.ops.aten.to:  # in inference mode it arrives whole
            named = _by_name(func, args, kwargs)
            source = named["self"]
            dtype, where = named.get("dtype") or source.dtype, torch.device(named.get("device") or source.device)
            if dtype == source.dtype and where.type == source.device.type:
                return source
            moved = {"dtype": dtype, "device": where, "non_blocking": named.get("non_blocking", False)}
            return self._copied(torch.ops.aten._to_copy.default, (source,), moved)
        if func in (torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default):
            return self._copied(func, args, kwargs)
        if to_gpu:
            kwargs["device"] = "meta"
        # The GPU's tensors without content; the host's (indices, masks) likewise, though torch would copy them.
        result = func(*tree_map(_meta, args), **tree_map(_meta, kwargs))
        if _is_view(func):
            owner = next(part for part in tree_leaves(args) if isinstance(part, OnGpu))
            return tree_map(
                lambda part: OnGpu(part, owner.allocation) if isinstance(part, torch.Tensor) else part, result
            )
        uses = self._uses(func, args, kwargs)
        made: list[Use] = []
        arguments = [
            (f"argument {index}", tuple(part.shape), part.nbytes, False)
            for index, part in enumerate(tree_leaves((args, kwargs)))
            if isinstance(part, OnGpu)
        ]
        written = {id(_meta(part)): part for part in tree_leaves((args, kwargs)) if isinstance(part, OnGpu)}

        def wrap(part: Any) -> Any:
            if not isinstance(part, torch.Tensor):
                return part
            if id(part) in written:
                return written[id(part)]
            wrapped = OnGpu(part, gpu.allocate(part.nbytes))
            use = gpu.use(wrapped, writes=True)
            if use is not None and "empty" not in name:
                made.append(use)
            arguments.append(("result", tuple(part.shape), part.nbytes, True))
            return wrapped

        result = tree_map(wrap, result)
        if (uses or made) and "empty" not in name:  # which allocates and launches nothing
            gpu.run(name, [*uses, *made], tuple(arguments))
        return result

    def _copied(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """A copy between the host and the GPU, or on the GPU."""
        gpu = self._gpu
        if func is torch.ops.aten.copy_.default:
            target, source, *rest = args
            non_blocking = bool(rest[0]) if rest else bool(kwargs.get("non_blocking", False))
            result = target
        else:
            [source] = args
            non_blocking = bool(kwargs.get("non_blocking", False))
            device = torch.device(kwargs.get("device") or source.device)
            dtype = kwargs.get("dtype") or source.dtype
            if device.type == "cuda":
                meta = torch.empty_like(_meta(source), dtype=dtype, device="meta")
                target = result = OnGpu(meta, gpu.allocate(meta.nbytes))
            else:
                target = result = torch.zeros(source.shape, dtype=dtype)
        uses = [use for use in (gpu.use(source, writes=False), gpu.use(target, writes=True)) if use is not None]
        arguments = tuple(
            (name, tuple(part.shape), part.nbytes, name == "target")
            for name, part in (("source", source), ("target", target))
        )
        crosses = isinstance(source, OnGpu) != isinstance(target, OnGpu)
        gpu.run(f"{'copy over' if crosses else 'copy'} {tuple(target.shape)}", uses, arguments)
        host = target if isinstance(source, OnGpu) else source
        if crosses and host is target:
            torch.ops.aten.zero_.default(target)  # there is no content to arrive
        if crosses and (not non_blocking or gpu.use(host, writes=False) is None):
            gpu.wait(gpu.current.clock)  # memory that is not pinned is copied while the host waits
        return result

    def _uses(self, func: Any, args: Any, kwargs: dict[str, Any]) -> list[Use]:
        found: list[Use] = []
        schema = func._schema.arguments
        named = [*zip(schema, args, strict=False)]
        named += [(argument, kwargs[argument.name]) for argument in schema if argument.name in kwargs]
        for argument, value in named:
            writes = argument.alias_info is not None and argument.alias_info.is_write
            for part in tree_leaves(value):
                if isinstance(part, torch.Tensor):
                    use = self._gpu.use(part, writes=writes)
                    if use is not None:
                        found.append(use)
        return found


def _by_name(func: Any, args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    names = [argument.name for argument in func._schema.arguments]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def tree_leaves(tree: Any) -> list[Any]:
    leaves: list[Any] = []
    tree_map(leaves.append, tree)
    return leaves


def _meta(part: Any) -> Any:
    if isinstance(part, OnGpu):
        return part.meta
    if isinstance(part, torch.Tensor) and part.device.type == "cpu" and part.dim() > 0:
        return torch.empty_like(part, device="meta")
    return part


def _is_view(func: Any) -> bool:
    returns = func._schema.returns
    return bool(returns) and returns[0].alias_info is not None and not returns[0].alias_info.is_write
