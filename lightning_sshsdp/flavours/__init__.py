"""The strategy classes, one module for each Lightning package, because their bases are distinct."""
