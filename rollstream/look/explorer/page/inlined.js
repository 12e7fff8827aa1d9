// Starts the explorer's page in a report, which holds its modules and answers, packed: without a
// server and without the network. A browser that cannot unpack them shows the sheet as it stands.

(async () => {
  const packed = document.getElementById("packed").textContent.trim();
  const bytes = Uint8Array.from(atob(packed), (letter) => letter.charCodeAt(0));
  const plain = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  const { modules, answers } = await new Response(plain).json();
  const made = new Map(); // path → URL of the module
  const url = (path) => {
    if (!made.has(path)) {
      const text = modules[path].replace(/(from\s*|import\()"(\.[^"]+)"/g, (whole, before, to) => {
        const inside = new URL(to, `blob:/${path}`).pathname.slice(1);
        return inside in modules ? `${before}"${url(inside)}"` : whole;
      });
      made.set(path, URL.createObjectURL(new Blob([text], { type: "text/javascript" })));
    }
    return made.get(path);
  };
  globalThis.rollstreamAnswers = answers;
  await import(url("app.js"));
})().catch((error) => console.info("the explorer did not start:", error));
