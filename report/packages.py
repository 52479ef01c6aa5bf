"""Finds the command that installs something missing, for the package manager in use."""

from __future__ import annotations

import shutil

from nvme_ops.op_builder import probes

_CONDA = "conda install -y -c conda-forge {}"
_INSTALL = {
    "apt-get": "apt-get install -y {}",
    "dnf": "dnf install -y {}",
    "yum": "yum install -y {}",
    "zypper": "zypper install -y {}",
    "pacman": "pacman -S --noconfirm {}",
    "apk": "apk add {}",
}
# The package by manager; "" is the name that the RPM distributions share.
_NAMES = {
    "compiler": {"apt-get": "g++", "pacman": "gcc", "apk": "g++", "conda": "gxx", "": "gcc-c++"},
    "python headers": {"apt-get": "python3-dev", "pacman": "python", "conda": "python", "": "python3-devel"},
    # the package with the headers brings the library
    "libaio": {"apt-get": "libaio-dev", "pacman": "libaio", "apk": "libaio-dev", "conda": "libaio", "": "libaio-devel"},
    "nvidia-gds": {"": "nvidia-gds"},  # brings the module nvidia-fs
}


def install_command(piece: str) -> str:
    """Returns the command that installs ``piece``, a key of the table: conda's in conda, else the system's."""
    names = _NAMES[piece]
    if "conda" in names and probes.conda_prefix() is not None:
        return _CONDA.format(names["conda"])
    for manager, command in _INSTALL.items():
        if shutil.which(manager):
            return command.format(names.get(manager, names[""]))
    return f"install {names['']} ({names.get('apt-get', names[''])} on Debian) with the system's package manager"
