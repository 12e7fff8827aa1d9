// Shows parts of a page that the program laid out and drew (`rollstream/look/report/elements.py`): the
// sheet of a run, charts. They come as `[tag, attributes, children]` with their texts as text, or
// stand in a report's page already (`treeOf`).

import { h } from "./vendor/preact.js";
import { Chart } from "./chart.js";

/** Nodes of elements; a chart shows its values at the cursor. `onPick(x)`, `onZoom(from, to)`. */
export function tree(nodes, actions = {}) {
  return nodes.map((node) => {
    if (typeof node === "string") return node;
    const [tag, attributes, children] = node;
    return attributes.class === "chart" && tag === "svg"
      ? h(Chart, { attributes, children, ...actions })
      : h(tag, attributes, ...tree(children, actions));
  });
}

/** The parts of a page that stands in the document already. */
export function treeOf(element) {
  return [...element.childNodes].map((node) => node.nodeType === Node.TEXT_NODE ? node.data
    : [node.localName, Object.fromEntries([...node.attributes].map((one) => [one.name, one.value])),
       treeOf(node)]);
}
