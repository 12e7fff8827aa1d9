"""The seccomp filter of a sandbox (BPF). Kernel interfaces without a namespace are refused with
EPERM: key rings, sockets of virtual machines (AF_VSOCK reaches the machine's host from any network
namespace), performance events, BPF, io_uring; so are all calls in another architecture's numbers
(32 bit).
"""

import platform
import struct

_ALLOW, _REFUSE = 0x7FFF0000, 0x00050000 | 1  # SECCOMP_RET_ALLOW, SECCOMP_RET_ERRNO | EPERM
_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data
_X32 = 0x40000000  # numbers of the x32 interface begin here
_FAMILIES = (1, 2, 10, 16)  # AF_UNIX, AF_INET, AF_INET6, AF_NETLINK: each has a namespace

# Numbers by architecture: AUDIT_ARCH, socket, and the refused calls by name.
_REFUSED = {
    "x86_64": {
        "bpf": 321, "perf_event_open": 298, "userfaultfd": 323, "add_key": 248,
        "request_key": 249, "keyctl": 250, "io_uring_setup": 425, "io_uring_enter": 426,
        "io_uring_register": 427, "kexec_load": 246, "kexec_file_load": 320, "init_module": 175,
        "finit_module": 313, "delete_module": 176, "mount": 165, "umount2": 166,
        "pivot_root": 155, "move_mount": 429, "open_tree": 428, "fsopen": 430, "fsmount": 432,
        "fsconfig": 431, "fspick": 433, "mount_setattr": 442, "setns": 308, "unshare": 272,
        "quotactl": 179, "quotactl_fd": 443, "acct": 163, "swapon": 167, "swapoff": 168,
        "reboot": 169, "settimeofday": 164, "clock_settime": 227, "adjtimex": 159,
        "open_by_handle_at": 304, "name_to_handle_at": 303, "syslog": 103, "iopl": 172,
        "ioperm": 173, "lookup_dcookie": 212, "fanotify_init": 300, "nfsservctl": 180,
        "vhangup": 153, "mbind": 237, "set_mempolicy": 238, "migrate_pages": 256,
        "move_pages": 279, "modify_ldt": 154,
    },
    "aarch64": {
        "bpf": 280, "perf_event_open": 241, "userfaultfd": 282, "add_key": 217,
        "request_key": 218, "keyctl": 219, "io_uring_setup": 425, "io_uring_enter": 426,
        "io_uring_register": 427, "kexec_load": 104, "kexec_file_load": 294, "init_module": 105,
        "finit_module": 273, "delete_module": 106, "mount": 40, "umount2": 39,
        "pivot_root": 41, "move_mount": 429, "open_tree": 428, "fsopen": 430, "fsmount": 432,
        "fsconfig": 431, "fspick": 433, "mount_setattr": 442, "setns": 268, "unshare": 97,
        "quotactl": 60, "quotactl_fd": 443, "acct": 89, "swapon": 224, "swapoff": 225,
        "reboot": 142, "settimeofday": 170, "clock_settime": 112, "adjtimex": 171,
        "open_by_handle_at": 265, "name_to_handle_at": 264, "syslog": 116, "lookup_dcookie": 18,
        "fanotify_init": 262, "nfsservctl": 42, "vhangup": 58, "mbind": 235,
        "set_mempolicy": 237, "migrate_pages": 238, "move_pages": 239,
    },
}  # fmt: skip
_ARCHITECTURES = {"x86_64": (0xC000003E, 41), "aarch64": (0xC00000B7, 198)}
_UNCOUNTED = {  # memory that no limit of a process counts; refused where no control group counts it
    "x86_64": {"memfd_create": 319, "memfd_secret": 447, "shmget": 29},
    "aarch64": {"memfd_create": 279, "memfd_secret": 447, "shmget": 194},
}


def has_call_filter(machine: str | None = None) -> bool:
    return (machine or platform.machine()) in _ARCHITECTURES


def call_filters() -> dict[str, str]:
    """Returns the filters in hexadecimal, for a process that sets its own where a control group
    counts memory.
    """
    return {name: call_filter(True, name).hex() for name in _ARCHITECTURES}


def call_filter(counts_memory: bool, machine: str | None = None) -> bytes:
    """Without `counts_memory` (by a control group) calls that make memory outside of an address
    space are refused too.
    """
    name = machine or platform.machine()
    architecture, socket = _ARCHITECTURES[name]
    refused = set(_REFUSED[name].values())
    if not counts_memory:
        refused |= set(_UNCOUNTED[name].values())
    checks = sorted(refused)
    families = len(_FAMILIES)
    # The program: [head][one check per refused call][the socket's families][allow][refuse]
    head = [
        _line(_LOAD, 0, 0, _ARCHITECTURE),
        _line(_EQUAL, 1, 0, architecture),
        _line(_RETURN, 0, 0, _REFUSE),
        _line(_LOAD, 0, 0, _NUMBER),
        _line(_AT_LEAST, 0, 1, _X32),
        _line(_RETURN, 0, 0, _REFUSE),
    ]
    after = 1 + 1 + families  # the socket's check, its load, its families
    body = [
        _line(_EQUAL, len(checks) - 1 - place + after + 1, 0, number)
        for place, number in enumerate(checks)
    ]
    tail = [_line(_EQUAL, 0, 1 + families, socket), _line(_LOAD, 0, 0, _FIRST_ARGUMENT)]
    for place, family in enumerate(_FAMILIES):
        is_last = place == families - 1
        tail.append(_line(_EQUAL, families - 1 - place, 1 if is_last else 0, family))
    ends = [_line(_RETURN, 0, 0, _ALLOW), _line(_RETURN, 0, 0, _REFUSE)]
    return b"".join([*head, *body, *tail, *ends])


def _line(code: int, if_true: int, if_false: int, value: int) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)
