"""One file a growth method; importing the package registers them all."""

from auxin.methods.base import METHODS, Method, Proposal, SiteView, register, resolve
from auxin.methods.gradmax import GradMax
from auxin.methods.random import Random
from auxin.methods.sprout import Sprout
from auxin.methods.tiny import Tiny

__all__ = [
    "METHODS",
    "GradMax",
    "Method",
    "Proposal",
    "Random",
    "SiteView",
    "Sprout",
    "Tiny",
    "register",
    "resolve",
]
