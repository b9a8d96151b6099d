"""PyTorch on the asynchronous device: tensors whose operations are queued, and run later on real memory.

Code under test asks for tensors of device `meta`, which PyTorch has everywhere, and a dispatch mode gives it
tensors of this device instead. Views happen at once, as on a GPU; everything else is queued on the current
stream, and its operands are addresses: the memory may have another owner by then. Memory comes from a caching
allocator, which hands a block out again to its own stream as soon as nobody refers to it.

While an operation runs, every element of device memory, or of pinned host memory, that one of its PyTorch
calls reads or writes is shown to the race detector: of an index or an index write just the elements that it
names. What needs a value on the host (`item`, a copy to the CPU) waits for the stream, as on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from zos_sglang.testing.races.device import Device

DEVICE = torch.device("meta")
aten: Any = torch.ops.aten
#: Blocks are powers of two, so that a free one fits the next tensor of about the same size.
SMALLEST_BLOCK = 64


class Block:
    """A piece of device memory with an owner; free again when the last tensor on it is gone."""

    def __init__(self, memory: Memory, pool: str, storage: torch.Tensor) -> None:
        self.memory, self.pool, self.storage = memory, pool, storage
        self.users: list[Any] = []

    def __del__(self) -> None:
        self.memory.give(self)


class Memory:
    """The caching allocator. `names` maps the address of what is watched to its name."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.names: dict[int, str] = {}
        #: Watched host memory stays: another tensor at its address would go by its name.
        self._kept: list[torch.Tensor] = []
        self._free: dict[tuple[str, int], list[torch.Tensor]] = {}
        self._in_use: list[tuple[tuple[str, int], torch.Tensor, list[tuple[Any, int]]]] = []

    def take(self, nbytes: int) -> Block:
        size, pool = max(SMALLEST_BLOCK, 1 << (nbytes - 1).bit_length()), self.device.current.name
        self._reclaim()
        if free := self._free.get((pool, size)):
            return Block(self, pool, free.pop())
        storage = torch.zeros(size, dtype=torch.uint8)
        self.names[storage.data_ptr()] = f"block {len(self.names)}"
        return Block(self, pool, storage)

    def give(self, block: Block) -> None:
        key = block.pool, block.storage.numel()
        if block.users:
            self._in_use.append((key, block.storage, [(s, s.queued) for s in block.users]))
        else:
            self._free.setdefault(key, []).append(block.storage)

    def watch_host(self, tensor: torch.Tensor, name: str) -> None:
        """Treat a host tensor as pinned memory that streams copy from or to."""
        self._kept.append(tensor)
        self.names[tensor.untyped_storage().data_ptr()] = name

    def touch(self, tensor: torch.Tensor, label: str, *, writes: bool, at: Any = None) -> None:
        """The elements of a tensor, or those that index `at` names, are read or written."""
        name = self.names.get(tensor.untyped_storage().data_ptr())
        if name is None or tensor.numel() == 0:
            return
        size = tensor.itemsize
        places = torch.arange(0, tensor.untyped_storage().nbytes(), size)
        places = places.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
        if at is not None:
            places = aten.index.Tensor(places, at)
        self.device.touch_all([(name, place) for place in places.flatten().tolist()], label, writes=writes)

    def _reclaim(self) -> None:
        for entry in self._in_use[:]:
            key, storage, users = entry
            if all(stream.done >= position for stream, position in users):
                self._in_use.remove(entry)
                for place in range(key[1]):
                    self.device.detector.forget((self.names[storage.data_ptr()], place))
                self._free.setdefault(key, []).append(storage)


class DeviceTensor(torch.Tensor):
    """Shape and type of a tensor of the device; `raw` is its memory, not to be touched by the host."""

    raw: torch.Tensor
    block: Block
    simulated: Simulated

    @staticmethod
    def make(simulated: Simulated, raw: torch.Tensor, block: Block) -> DeviceTensor:
        made: DeviceTensor = torch.Tensor._make_wrapper_subclass(
            DeviceTensor,
            raw.shape,
            strides=raw.stride(),
            storage_offset=raw.storage_offset(),
            dtype=raw.dtype,
            device=DEVICE,
        )
        made.raw, made.block, made.simulated = raw, block, simulated
        return made

    def record_stream(self, stream: Any) -> None:
        """Once free, the block is not handed out before `stream` is done with what it has by then."""
        self.block.users.append(stream)

    def tolist(self) -> Any:
        return self.simulated.home(self).tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        mine = next(a for a in tree_leaves((args, kwargs)) if isinstance(a, DeviceTensor))
        return mine.simulated.dispatch(func, args, kwargs or {})


class Pinned(torch.Tensor):
    """Host memory that streams copy to; the host's own reads are shown to the detector."""

    memory: Memory | None = None

    def tolist(self) -> Any:
        plain = self.as_subclass(torch.Tensor)
        assert Pinned.memory is not None
        Pinned.memory.touch(plain, "tolist", writes=False)
        return plain.tolist()


class Simulated(TorchDispatchMode):
    """While entered, tensors of device `meta` are tensors of `device`. One at a time."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self.device = device
        self.memory = Pinned.memory = Memory(device)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        asked = kwargs.get("device")
        ours = asked is not None and torch.device(asked) == DEVICE
        if ours or any(isinstance(leaf, DeviceTensor) for leaf in tree_leaves((args, kwargs))):
            return self.dispatch(func, args, kwargs)
        _show(self.memory, func, args, kwargs)
        return func(*args, **kwargs)

    def launch(self, label: str, kernel: Callable[..., None], *args: Any, **options: Any) -> None:
        """Queue a kernel that is written in PyTorch and changes its operands."""
        raw = _raw((args, options))
        self._enqueue(label, lambda: kernel(*raw[0], **raw[1]))

    def empty(self, shape: Any, dtype: torch.dtype) -> DeviceTensor:
        return self._new(torch.empty(shape, dtype=dtype, device=DEVICE))

    # ------------------------------------------------------------ PyTorch's calls

    def dispatch(self, func: Any, args: Any, kwargs: Any) -> Any:
        name = str(func)
        if func.is_view:
            return self._view(func, args, kwargs)
        if func is aten._local_scalar_dense.default:
            return self.home(args[0]).item()
        if kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cpu":
            if name.startswith("aten.empty_like"):
                made = torch.empty(args[0].shape, dtype=args[0].dtype)
                self.memory.watch_host(made, f"pinned {len(self.memory.names)}")
                return made.as_subclass(Pinned)
            return self.home(args[0]).to(kwargs.get("dtype") or args[0].dtype)
        if func._schema.is_mutable:
            raw = _raw((args, kwargs))
            self._enqueue(name, lambda: func(*raw[0], **raw[1]))
            return args[0]
        return self._functional(func, name, args, kwargs)

    def _view(self, func: Any, args: Any, kwargs: Any) -> Any:
        block = next(a.block for a in tree_leaves(args) if isinstance(a, DeviceTensor))
        raw = func(*_raw(args), **kwargs)
        return tree_map(lambda t: DeviceTensor.make(self, t, block), raw)

    def _functional(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        shapes = func(*tree_map(_shape, args), **tree_map(_shape, kwargs))
        out = tree_map(self._new, shapes)
        if name.startswith(("aten.empty", "aten.new_empty")):
            return out
        on_host = {**kwargs, "device": torch.device("cpu")} if "device" in kwargs else kwargs
        if not kwargs.get("non_blocking"):
            # The driver stages pageable memory before the call returns; pinned memory is read later.
            args = tree_map(_staged, args)
        raw, into = _raw((args, on_host)), [t.raw for t in tree_leaves(out)]

        def run() -> None:
            for to, value in zip(into, tree_leaves(func(*raw[0], **raw[1])), strict=True):
                to.copy_(value)

        self._enqueue(name, run)
        return out

    def home(self, tensor: DeviceTensor) -> torch.Tensor:
        """A copy on the host, now: the host waits for the stream."""
        raw, home = tensor.raw, torch.empty(tensor.shape, dtype=tensor.dtype)
        self._enqueue("copy to the host", lambda: home.copy_(raw))
        self.device.current.synchronize()
        return home

    def _new(self, shape: Any) -> Any:
        block = self.memory.take(max(1, shape.numel() * shape.itemsize))
        flat = block.storage.view(shape.dtype)
        return DeviceTensor.make(self, flat.as_strided(shape.shape, shape.stride()), block)

    def _enqueue(self, label: str, work: Callable[[], Any]) -> None:
        memory = self.memory

        def run() -> None:
            with _Watched(memory):
                work()

        self.device.current.enqueue(run, label)


class _Watched(TorchDispatchMode):
    """On a stream's thread: shows what each PyTorch call of an operation reads and writes."""

    def __init__(self, memory: Memory) -> None:
        super().__init__()
        self.memory = memory

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        _show(self.memory, func, args, kwargs)
        return func(*args, **kwargs)


def _show(memory: Memory, func: Any, args: Any, kwargs: Any) -> None:
    """Show the detector what a call reads and writes of the memory that is watched."""
    if func.is_view:
        return
    named = str(func).removeprefix("aten.").split(".")[0]
    arguments = list(zip(func._schema.arguments, args, strict=False))
    arguments += [(a, kwargs[a.name]) for a in func._schema.arguments if a.name in kwargs]
    at = args[1] if named in ("index", "index_put", "index_put_") else None
    for declared, value in arguments:
        writes = declared.alias_info is not None and declared.alias_info.is_write
        indexed = at if declared.name == "self" else None
        for leaf in tree_leaves(value):
            if isinstance(leaf, torch.Tensor):
                memory.touch(leaf, named, writes=writes, at=indexed)


def _raw(values: Any) -> Any:
    return tree_map(lambda a: a.raw if isinstance(a, DeviceTensor) else a, values)


def _shape(value: Any) -> Any:
    """A tensor of PyTorch's own meta device that looks like `value`."""
    if isinstance(value, torch.Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=DEVICE)
    return value


def _staged(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) and not isinstance(value, DeviceTensor) else value


@contextmanager
def simulated(device: Device) -> Iterator[Simulated]:
    """PyTorch on `device`, for the length of one block."""
    with Simulated(device) as torch_on_device:
        yield torch_on_device
