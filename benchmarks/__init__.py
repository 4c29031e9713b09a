"""Programs that measure pymoe; a package, so that no other one of this name is found before it."""
