"""What `status` tells of the layers that an operator keeps in the checkpoint's layout."""

from dataclasses import dataclass

from deepseek_v4_sm120.patching import report


@dataclass
class KeptWeights:
    """Layers, bytes of their weights (`what` they are, in words), and bytes that exist only because of shadow mode."""

    operator: str
    what: str
    layers: int = 0
    weight_bytes: int = 0
    shadow_copy_bytes: int = 0

    def add(self, weight_bytes: int) -> None:
        """One more layer."""
        self.layers += 1
        self.weight_bytes += weight_bytes
        report.add_note(self.operator, self.describe)

    def remove(self, weight_bytes: int) -> None:
        """A layer that was added is SGLang's again."""
        self.layers -= 1
        self.weight_bytes -= weight_bytes

    def describe(self) -> str:
        text = f"{self.operator}: {self.layers} layers, {self.weight_bytes / 1e9:.2f} GB {self.what}"
        more = f"; {self.shadow_copy_bytes / 1e9:.2f} GB more for the shadow's copy"
        return text + (more if self.shadow_copy_bytes else "")
