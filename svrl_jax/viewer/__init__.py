"""Records on disk -> a static page to look at what agents did, and the same inside a notebook."""

from svrl_jax.viewer.notebook import show

__all__ = ["show"]
