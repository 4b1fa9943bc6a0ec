"""All that speaks HTTP: the server, the OpenAI routes, the routes that show and change the cluster, the web page."""
