"""How one checked call of attention is computed. Nothing here knows parameters or layers."""
