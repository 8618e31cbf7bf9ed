"""Models on several devices: how they are placed, and layers whose parts are on different devices."""
