// Asks the site's own search, as a browser does: node search.mjs SITE WORDS... prints for each the places that it finds, best first.
import fs from "fs";

const [site, ...searched] = process.argv.slice(2);
const index = JSON.parse(fs.readFileSync(`${site}/search.json`, "utf8"));
const folder = `${site}/assets/javascripts/workers`;
const script = fs.readdirSync(folder).find(name => name.startsWith("search") && name.endsWith(".js"));
const waiting = [];
globalThis.self = globalThis;
globalThis.postMessage = message => waiting.shift()(message);
(0, eval)(fs.readFileSync(`${folder}/${script}`, "utf8"));

const ask = data => new Promise(answered => { waiting.push(answered); globalThis.onmessage({ data }); });
const filter = () => ({ // the search writes into it
  input: { type: "operator", data: { operator: "and", operands: [] } },
  aggregation: { input: [{ type: "term", data: { field: "tags" } }] },
});
await ask({ type: 0, data: index });
const found = {};
for (const input of searched) {
  const { data } = await ask({ type: 2, data: { input, filter: filter() } });
  found[input] = data.items.map(item => index.items[item.id].location);
}
console.log(JSON.stringify(found));
