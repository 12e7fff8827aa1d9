"""Memory of real processes against what `rollstream plan` computes."""
