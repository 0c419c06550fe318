"""Optimizers that need whole matrices, written as optax transformations: SOAP and Shampoo."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax


class SoapState(NamedTuple):
    """Moments, the sums of outer products, and their eigenvectors."""

    mu: Any
    nu: Any
    left: Any
    right: Any
    left_basis: Any
    right_basis: Any


def _eye(x, dim):
    size = x.shape[dim]
    return jnp.broadcast_to(jnp.eye(size, dtype=x.dtype), (*x.shape[:-2], size, size))


def scale_by_soap(b1=0.95, b2=0.95, eps=1e-8):
    """Return SOAP: Adam in the eigenbasis of Shampoo's sums, by one QR step each time.

    Source: arXiv 2409.11321, algorithm 3.
    """

    def init(params):
        zeros = jax.tree.map(jnp.zeros_like, params)
        left, right = (jax.tree.map(lambda x, d=d: _eye(x, d), params) for d in (-2, -1))
        return SoapState(zeros, zeros, left, right, left, right)

    def one(g, mu, nu, left, right, p, q):
        left = b2 * left + (1 - b2) * jnp.einsum("...ij,...kj->...ik", g, g)
        right = b2 * right + (1 - b2) * jnp.einsum("...ji,...jk->...ik", g, g)
        p, _ = jnp.linalg.qr(left @ p)
        q, _ = jnp.linalg.qr(right @ q)
        mu = b1 * mu + (1 - b1) * g
        turned = jnp.swapaxes(p, -1, -2) @ g @ q
        nu = b2 * nu + (1 - b2) * turned**2
        step = (jnp.swapaxes(p, -1, -2) @ mu @ q) / (jnp.sqrt(nu) + eps)
        return p @ step @ jnp.swapaxes(q, -1, -2), mu, nu, left, right, p, q

    def update(grads, state, params=None):
        found = jax.tree.map(one, grads, *state)
        columns = jax.tree.transpose(jax.tree.structure(grads), None, found)
        return columns[0], SoapState(*columns[1:])

    return optax.GradientTransformation(init, update)


def scale_by_shampoo(eps=1.0):
    """Return Shampoo: the inverse fourth roots of both sums, by eigenvalues.

    Source: arXiv 1802.09568, algorithm 1.
    """

    def init(params):
        return tuple(jax.tree.map(lambda x, d=d: eps * _eye(x, d), params) for d in (-2, -1))

    def root(x):
        values, vectors = jnp.linalg.eigh(x)
        return jnp.einsum("...ij,...j,...kj->...ik", vectors, values**-0.25, vectors)

    def one(g, left, right):
        left = left + jnp.einsum("...ij,...kj->...ik", g, g)
        right = right + jnp.einsum("...ji,...jk->...ik", g, g)
        return root(left) @ g @ root(right), left, right

    def update(grads, state, params=None):
        found = jax.tree.map(one, grads, *state)
        updates, *state = jax.tree.transpose(jax.tree.structure(grads), None, found)
        return updates, tuple(state)

    return optax.GradientTransformation(init, update)


def for_matrices(tx):
    """Return an optimizer for leaves of two dims and more, and Adam for the others."""

    def labels(params):
        return jax.tree.map(lambda x: "matrix" if x.ndim > 1 else "other", params)

    return optax.partition({"matrix": tx, "other": optax.scale_by_adam()}, labels)
