"""Meshes: the ranks of a job as a grid with named axes."""

from __future__ import annotations

from disttrain.lazy_names import answering
from disttrain.mesh.checked import axis_of_several, checked_axis, checked_mesh
from disttrain.mesh.device_mesh import DeviceMesh, init_device_mesh
from disttrain.mesh.layout import MeshLayout

__all__ = ["DeviceMesh", "MeshLayout", "axis_of_several", "checked_axis", "checked_mesh", "init_device_mesh"]

__getattr__ = answering(__name__)
