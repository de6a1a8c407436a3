from typing import Any

from torch import Tensor

def tree_bytes(capacity: int, /) -> int: ...
def tree(address: int, capacity: int, fresh: bool, /) -> Any: ...
def set(tree: Any, index: int | Tensor, priority: int | Tensor, count: int, /) -> int | None: ...
def update(
    tree: Any, index: int | Tensor, error: int | Tensor, count: int, alpha: float, epsilon: float, /
) -> float | None: ...
def find(tree: Any, mass: int | Tensor, count: int, index: int | Tensor, threads: int, /) -> bool | None: ...
def sample(
    tree: Any,
    state: int,
    count: int,
    beta: float,
    index: int | Tensor,
    weight: int | Tensor,
    stratified: bool,
    threads: int,
    /,
) -> bool | None: ...
def gather(base: int, stride: int, bytes: int, index: int, count: int, out: int, /) -> None: ...
def split(base: int, stride: int, index: int, count: int, places: int, out: tuple[int, ...], /) -> None: ...
def background_thread() -> Any: ...
def gather_later(
    thread: Any, base: int, stride: int, bytes: int, index: int, count: int, out: int, /
) -> int: ...
def split_later(
    thread: Any, base: int, stride: int, index: int, count: int, places: int, out: tuple[int, ...], /
) -> int: ...
def await_background_thread(thread: Any, number: int, /) -> None: ...
def touch(base: int, order: int, count: int, /) -> float: ...
def expected_topics(
    x: int,
    width: int,
    topics: int,
    row: int,
    rows: int,
    scale: float,
    offset: float,
    factor: int,
    beta: int,
    /,
) -> None: ...
def fold_in(
    starts: int,
    word: int,
    times: int,
    count: int,
    beta: int,
    width: int,
    topics: int,
    alpha: int,
    iterations: int,
    tolerance: float,
    gamma: int,
    statistics: int,
    /,
) -> int: ...
def add_rows(x: int, width: int, row: int, rows: int, values: int, step: float, /) -> None: ...
def lay_frames(
    pixels: int, stride: int, shape: tuple[int, int, int], batch: int, bits: int, out: int, /
) -> None: ...
def torso_kernels() -> list[str]: ...
def torso(kernels: str, layers: tuple[tuple[int, int, int, int, int, int], ...], features: int, /) -> Any: ...
def torso_inner(torso: Any, batch: int, /) -> int: ...
def torso_forward(
    torso: Any, batch: int, laid: int, parameters: tuple[int, ...], inner: int, features: int, /
) -> None: ...
def torso_backward(
    torso: Any,
    batch: int,
    laid: int,
    inner: int,
    features: int,
    gradient: int,
    parameters: tuple[int, ...],
    gradients: tuple[int, ...],
    first: int,
    /,
) -> None: ...
def normalize_moments(
    rows: int, channels: int, bits: int, x: int, mean: int, squares: int, threads: int, /
) -> None: ...
def normalize_apply(
    rows: int,
    channels: int,
    bits: int,
    x: int,
    residual: int,
    scale: int,
    shift: int,
    rectify: bool,
    y: int,
    threads: int,
    /,
) -> None: ...
def normalize_gradient_sums(
    rows: int,
    channels: int,
    bits: int,
    gradient: int,
    y: int,
    x: int,
    mean: int,
    sum: int,
    product: int,
    threads: int,
    /,
) -> None: ...
def normalize_gradient(
    rows: int,
    channels: int,
    bits: int,
    gradient: int,
    y: int,
    x: int,
    a: int,
    b: int,
    c: int,
    x_gradient: int,
    residual_gradient: int,
    threads: int,
    /,
) -> None: ...
def total(tree: Any, /) -> float: ...
def minimum(tree: Any, /) -> float: ...
def leaves(tree: Any, /) -> int: ...
def simd() -> str: ...
def use(name: str, /) -> None: ...
