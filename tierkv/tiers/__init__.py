"""Secondary tiers: the interface, what tiers share, and one package for each tier."""
