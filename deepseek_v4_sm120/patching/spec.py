"""What a patch is: plain data, filled in by sglang_patches/ and read by the engine. No SGLang name, no kernel."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from deepseek_v4_sm120.patching import known_files, reads
from deepseek_v4_sm120.patching.contract import Contract
from deepseek_v4_sm120.patching.known_files import KnownFiles
from deepseek_v4_sm120.patching.ledger import Ledger
from deepseek_v4_sm120.patching.reads import Reads

MODES = ("sm120", "ops", "seams")  # normal use and the two validation switches (settings.Settings.mode)


class PatchError(RuntimeError):
    """A patch does not fit. Never an ImportError: SGLang guards optional imports by catching those."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """One name to replace, in the host versions where the job is done there.

    where        "module:qualname"; qualname may be "Class.method"
    sglang       versions, as a PEP 440 specifier set; pre-releases count
    contract     what the definition on disk must look like, else the patch is BROKEN
    replacement  "module:function": replace(original) -> what is put there; imported only when it is applied
    caller       module whose calls of the name are checked too: they may pass only what the contract knows
    rebound      a function that others only call: where the host imported it ahead of us, it is replaced in the modules
                 that have it by name as well, for which any other target is BROKEN
    """

    where: str
    sglang: str
    contract: Contract
    replacement: str
    caller: str | None = None
    rebound: bool = False

    @property
    def module(self) -> str:
        return self.where.partition(":")[0]

    @property
    def qualname(self) -> str:
        return self.where.partition(":")[2]


@dataclass(frozen=True, kw_only=True)
class Patch:
    """One reason to touch the host, with all the places where it does.

    needs        what must load before it may be applied, "module:function" each (called without arguments)
    ahead        (module of the host, "module:function"): called without arguments in front of that module's import, in
                 processes that a server started and where the patch is not left out; what it raises fails the import
    default      active only while this one of the table's defaults is on
    variable     active only where this one of our variables, which names a folder, is set
    serves       the operator without which it makes no sense, where that is not its own name
    modes        in which modes it is active
    only_read    left out where one of its definitions is none that a human read, in whatever release: it makes up for
                 what exactly that code leaves out, and would do so twice where the host has mended it
    absent       why the versions that no target is for have no place for it
    stays        why its name is no setting: what goes wrong without it
    retire       when this row should be deleted
    """

    name: str
    why: str
    targets: tuple[Target, ...]
    retire: str
    needs: tuple[str, ...] = ()
    ahead: tuple[str, str] | None = None
    modes: tuple[str, ...] = MODES
    default: str | None = None
    variable: str | None = None
    serves: str | None = None
    only_read: bool = False
    absent: str = ""
    stays: str = ""


@dataclass(frozen=True, kw_only=True)
class StandIn:
    """A module that we provide where the real one is not installed.

    package      our package that stands in for it
    sglang       versions, as in Target
    only_after   only once this module is imported: nobody else's probe for `name` may find it
    condition    "module:function", asked at the import; False means that it stays absent
    """

    name: str
    why: str
    package: str
    sglang: str
    only_after: str
    condition: str


@dataclass(frozen=True, kw_only=True)
class Default:
    """A default of the host that is slow or wrong on SM120, and the value that is put in its place.

    why          what the host's default costs or breaks
    source       where that is known from: read in the code [R], measured by others [M], inferred [I]
    sglang       versions, as in Target
    on           whether it is applied when nobody asks; off wherever it was never seen to work on SM120
    on_in        versions, as in Target, in which `on` holds; in the others it is off
    environment  variable -> value, for variables that the user has not set
    arguments    server argument -> value, where the host still has None or "auto"; VALUE stands for `value`
    value        the number behind VALUE, which DSV4_SM120_SET=name=N changes
    unless       variables, each with the values of the user's own with which the row makes no sense; none: any, even ""
    only_with    server argument without which the row makes no sense
    only_where   server argument and its value elsewhere than at which the row is for those alone who ask for it
    how          what a user does to get the same, or to prevent it, without us
    """

    name: str
    why: str
    source: str
    sglang: str
    on: bool
    how: str
    on_in: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    arguments: Mapping[str, str | int] = field(default_factory=dict)
    value: int | None = None
    unless: tuple[tuple[str, tuple[str, ...]], ...] = ()
    only_with: str | None = None
    only_where: tuple[str, object] | None = None


VALUE = "<value>"  # in Default.arguments


@dataclass(frozen=True, kw_only=True)
class Table:
    """supported  host versions that we know at all
    preflight  the module whose import starts the check of all rows
    resolved_at, built_at  functions, "module:qualname", that the host calls for our model only: in a server's first
               process, while it resolves the arguments; in each worker, before it makes the layers. There a server is
               stopped that would have used a patch that does not fit
    agrees     "module:function", asked once in a process that is about to make the layers: raises where the server has
               processes elsewhere that run something else
    reviewed   the definitions that a human read; anything else is applied as UNREVIEWED. Asked when an engine starts
    known      version (None: the host does not tell one) -> what its files were found to be like
    reads      what replacements read of the host's objects; asked of a host that is ahead of what was reviewed
    """

    supported: str
    preflight: str
    patches: tuple[Patch, ...]
    resolved_at: str | None = None
    built_at: str | None = None
    agrees: str | None = None
    reviewed: Callable[[], Ledger] = Ledger
    known: Callable[[str | None], KnownFiles] = known_files.nothing
    reads: Callable[[], Reads] = reads.nothing
    stand_ins: tuple[StandIn, ...] = ()
    defaults: tuple[Default, ...] = ()

    @property
    def operators(self) -> tuple[str, ...]:
        """Names that are switched off or on as a whole: patches, and what they serve."""
        switched = (patch for patch in self.patches if not patch.stays)
        return tuple(dict.fromkeys(name for patch in switched for name in (patch.serves, patch.name) if name))

    @property
    def fixed(self) -> Mapping[str, str]:
        """Patches whose names are no settings, and why."""
        return {patch.name: patch.stays for patch in self.patches if patch.stays}
