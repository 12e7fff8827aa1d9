"""The settings that `rollstream tune` proposes against settings tried by hand: NAME tune."""
