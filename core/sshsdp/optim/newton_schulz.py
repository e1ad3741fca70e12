"""Newton-Schulz iteration towards the nearest orthogonal matrix, directly or through Gram matrices.

The quintic iteration of Muon (https://kellerjordan.github.io/posts/muon/): with ``X_0 = U / |U|``,

    ``X_{k+1} = X_k p(G_k)``, ``G_k = X_k^T X_k``, ``p(G) = a I + b G + c G^2``.

As ``G_{k+1} = p(G_k) G_k p(G_k)`` needs no ``X``, the result is ``U`` times one small factor that
comes from ``U^T U`` alone (`gram_factors`): what Muon needs when ``U`` is spread over ranks by
rows.
"""

from __future__ import annotations

import torch

__all__ = ["COEFFICIENTS", "gram_factors", "orthogonalize"]

# As in torch.optim.Muon.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)

Coefficients = tuple[float, float, float]


def orthogonalize(
    matrices: torch.Tensor,
    *,
    coefficients: Coefficients,
    num_steps: int,
    eps: float,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Iterate on whole matrices, as ``torch.optim.Muon`` does on each.

    Args:
        matrices: ``[batch, m, n]``, any floating dtype.
        coefficients: ``(a, b, c)`` of the polynomial.
        num_steps: Number of iterations.
        eps: Least norm to divide by.
        dtype: In which to iterate; torch.optim.Muon takes bfloat16.

    Returns:
        ``[batch, m, n]`` in ``dtype``.
    """
    a, b, c = coefficients
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.to(dtype)
    if is_tall:
        x = x.mT
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=eps)
    for _ in range(num_steps):
        gram = x @ x.mT
        update = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, update, x, beta=a)
    return x.mT if is_tall else x


def gram_factors(
    grams: torch.Tensor, *, coefficients: Coefficients, num_steps: int, eps: float
) -> torch.Tensor:
    """The factors ``Q`` for which ``U Q`` is what `orthogonalize` makes of ``U``.

    Args:
        grams: ``U^T U`` of every matrix, ``[batch, n, n]``, float32 or wider.
        coefficients: ``(a, b, c)`` of the polynomial.
        num_steps: Number of iterations, 1 or more.
        eps: Least norm to divide by.

    Returns:
        ``[batch, n, n]`` in the dtype of ``grams``.
    """
    a, b, c = coefficients
    squared = grams.diagonal(dim1=-2, dim2=-1).sum(-1)
    norm = squared.clamp(min=0).sqrt().clamp(min=eps)[:, None, None]
    gram = grams / norm.square()
    identity = torch.eye(grams.shape[-1], dtype=grams.dtype, device=grams.device)

    def polynomial() -> torch.Tensor:
        return torch.baddbmm(gram, gram, gram, beta=b, alpha=c) + a * identity

    step = polynomial()
    factor = step / norm
    for _ in range(num_steps - 1):
        gram = step @ gram @ step
        step = polynomial()
        factor = factor @ step
    return factor
