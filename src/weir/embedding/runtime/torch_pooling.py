"""How torch makes one vector of those of a text's tokens: the same sums as in the graphs."""

from typing import Any

from weir.embedding.recipe import Pooling, Recipe

LEAST = 1e-9  # what is divided by is at least that


def pooled_all(torch: Any, value: Any, mask: Any, pool: Any, recipe: Recipe) -> Any:
    """Return `value` [texts, length, size] pooled, float32: what `pool` [texts, length] is 0 for does not count."""
    made = [pooled(torch, value, mask, pool, pooling, recipe.window) for pooling in recipe.poolings]
    return made[0] if len(made) == 1 else torch.cat(made, dim=-1)


def pooled(torch: Any, value: Any, mask: Any, pool: Any, pooling: Pooling, window: int) -> Any:
    """Return what one of the poolings makes."""
    weights = pool.unsqueeze(-1)
    if pooling is Pooling.NONE:
        return value * weights
    if pooling is Pooling.CLS:
        return value[:, 0]
    if pooling is Pooling.SEP:
        return value[torch.arange(len(value), device=value.device), mask.sum(dim=1) - 1]
    if pooling is Pooling.MAX:
        return _highest(value, weights)
    if pooling is Pooling.MEAN_MAX:
        return torch.cat([_mean(value, weights), _highest(value, weights)], dim=-1)
    if pooling is Pooling.HIERARCHICAL:
        return _hierarchical(torch, value, weights, window)
    if pooling is Pooling.WEIGHTED_MEAN:
        return _mean(value, weights * weights.cumsum(dim=1))
    return _mean(value, weights, root=pooling is Pooling.MEAN_SQRT)


def bent(torch: Any, value: Any, activation: str) -> Any:
    """Return what the activation of a dense layer makes of its result."""
    if activation == "identity":
        return value
    return torch.nn.functional.gelu(value) if activation == "gelu" else getattr(torch, activation)(value)


def _mean(value: Any, weights: Any, root: bool = False) -> Any:
    count = weights.sum(dim=1).clamp(min=LEAST)
    return (value * weights).sum(dim=1) / (count.sqrt() if root else count)


def _hierarchical(torch: Any, value: Any, weights: Any, window: int) -> Any:
    sums, counts = _in_windows(torch, value * weights, window), _in_windows(torch, weights, window)
    enough = weights.sum(dim=1, keepdim=True).clamp(max=window) / window - 0.5 / window
    return _highest(sums / counts.clamp(min=LEAST), (counts > enough.clamp(min=LEAST)).float())


def _in_windows(torch: Any, value: Any, window: int) -> Any:
    filled = torch.nn.functional.pad(value.transpose(1, 2), (0, window - 1))
    return torch.nn.functional.avg_pool1d(filled, window, stride=1).transpose(1, 2)


def _highest(value: Any, weights: Any) -> Any:
    counts = weights > 0
    highest = value.masked_fill(~counts, float("-inf")).amax(dim=1)
    return highest.masked_fill(~counts.any(dim=1), 0.0)
