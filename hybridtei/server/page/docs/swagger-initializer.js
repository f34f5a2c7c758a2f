// Swagger UI, release 5.35.0 of the npm package swagger-ui-dist, over this server's document. `validatorUrl` would send the
// document's address to swagger.io. With syntax colours, each number of a vector would be an element of the page.

document.documentElement.classList.toggle("dark-mode", matchMedia("(prefers-color-scheme: dark)").matches);
SwaggerUIBundle({ url: "../api-doc/openapi.json", dom_id: "#docs", deepLinking: true, validatorUrl: null, syntaxHighlight: false });
