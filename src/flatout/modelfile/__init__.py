"""What a model file says: specs, headers and where files come from. No torch: the HTTP front process uses this too."""
