"""The control plane: who holds which page. Pure: no threads, no torch, no I/O, no clock of its own."""

from hicache.control.books import ControlConfig
from hicache.control.controller import Controller
from hicache.control.request import Request

__all__ = ["ControlConfig", "Controller", "Request"]
