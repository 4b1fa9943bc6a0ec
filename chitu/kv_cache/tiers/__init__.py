"""Where full pages of KV are kept beside the pool: host memory, and behind it slower stores."""
