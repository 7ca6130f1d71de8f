"""One file a layer family; importing the package registers them all."""

from auxin.layers import convolution, linear
from auxin.layers.base import Rule, register, rule_for

__all__ = ["Rule", "convolution", "linear", "register", "rule_for"]
