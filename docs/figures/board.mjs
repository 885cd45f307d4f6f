// Takes the pictures of docs/start.md, from a TensorBoard that shows the run of board.yaml:
// apt-get install chromium; npm install puppeteer-core; node board.mjs http://localhost:6006 docs
import puppeteer from 'puppeteer-core';

const [, , address, folder] = process.argv;
const browser = await puppeteer.launch({
  executablePath: process.env.CHROMIUM ?? '/usr/bin/chromium',
  // curves are drawn with WebGL, which a browser without a window has only in software
  args: ['--no-sandbox', '--use-angle=swiftshader', '--enable-unsafe-swiftshader', '--ignore-gpu-blocklist'],
});
const settings = '[aria-label="Toggle settings side pane"]';
const actualSize = '>>> paper-checkbox'; // the first one

async function picture(name, path, width, height, click) {
  const page = await browser.newPage();
  await page.setViewport({width, height});
  await page.goto(`${address}/${path}`, {waitUntil: 'networkidle0'});
  if (click) await (await page.waitForSelector(click)).click();
  await new Promise(resolve => setTimeout(resolve, 5000));
  await page.screenshot({path: `${folder}/tensorboard_${name}.png`});
  await page.close();
}

const curves = '^(reweighted|global)_test.(mean|worst_tenth)$|^mean_gate_weight.(global|local)$';
await picture('curves', `?smoothing=0&tagFilter=${encodeURIComponent(curves)}#timeseries`, 1440, 1010, settings);
await picture('hparams', '#hparams', 1440, 390);
await picture('gate_weights', '#images&tagFilter=mean_gate_weight', 1080, 1720, actualSize);
await picture('clusters', '#images&tagFilter=picked/by_client', 1080, 1720, actualSize);
await browser.close();
