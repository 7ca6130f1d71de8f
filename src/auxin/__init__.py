"""auxin: neural networks that find their own size."""

from auxin.checkpoint import load, save
from auxin.costs import multiply_adds, parameters
from auxin.diagnosis import Diagnosis, Row, diagnose
from auxin.errors import AuxinError, StaleGraphError
from auxin.grower import Grower
from auxin.growth import grow
from auxin.history import Growth, History, Record
from auxin.methods import GradMax, Method, Proposal, Random, Sprout, Tiny
from auxin.objectives import Objective
from auxin.policy import Policy
from auxin.select import Budget
from auxin.sites import find_sites
from auxin.structure import Site, Sites

__version__ = "0.1.0"

__all__ = [
    "AuxinError",
    "Budget",
    "Diagnosis",
    "GradMax",
    "Grower",
    "Growth",
    "History",
    "Method",
    "Objective",
    "Policy",
    "Proposal",
    "Random",
    "Record",
    "Row",
    "Site",
    "Sites",
    "Sprout",
    "StaleGraphError",
    "Tiny",
    "diagnose",
    "find_sites",
    "grow",
    "load",
    "multiply_adds",
    "parameters",
    "save",
]
