"""HTTP itself: the server, its connections and limits, who may call it. Knows no API."""
